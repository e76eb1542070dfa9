"""Connectors: an engine-neutral core (tracker, plans, scheduler and worker sides) and thin adapters per engine."""
