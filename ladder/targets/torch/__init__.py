"""Target `torch`: a real transformer, and scheduler, workers and cache servers in processes of their own.

What the simulation replaces is real here: sockets, shared memory, threads, files, processes, tensors. Tokens and KV
bytes are compared exactly, because the model's arithmetic is exact (`model.py`).
"""

from __future__ import annotations

from kvcore.ladder.targets.torch.climb import CELLS, cells, check, climb_cell

__all__ = ["CELLS", "cells", "check", "climb_cell"]
