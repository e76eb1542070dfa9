"""`kvcore doctor`: what works on this machine, what does not, and what to do about it."""
