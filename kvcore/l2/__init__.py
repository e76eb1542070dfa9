"""Outer stores: the adapter contract, the record envelope, and adapters for memory and local files."""
