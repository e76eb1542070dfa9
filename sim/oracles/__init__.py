"""Oracles: independent judges of a run. None of them is called by the code it judges."""
