"""Rungs 5 to 8 of the ladder: cases of the swarm, some hundred per rung, in which a part of the world is hostile."""
