"""Exhaustive sweeps: short scenarios, and one fault at every point at which it can happen."""
