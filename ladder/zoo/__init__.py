"""The bug zoo: deliberate bugs in the production code, and what it takes the simulation to see each of them."""
