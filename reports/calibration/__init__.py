"""Measure this machine with a real engine and the real cache, so that predictions can be held against runs."""
