"""Storms over real processes: rounds of weather over traffic, and a look at what is left."""
