"""Small bugs in loads, for the fingerprint model: most of them one block, once.

A block on a CPU holds, per layer, K as [dimension, token] and V as [token, dimension] (`fingerprint_pages` asks the
kernel; here it is written down, and a test compares the two).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS
from kvcore.ladder.targets.vllm.fingerprint import HEAD, Bits
from kvcore.ladder.targets.vllm_scheduler.mutants import Spoil
from kvcore.ports import Copy

Moves = list[Copy]


def _first_load(change: Callable[[Moves], Moves]) -> Spoil:
    """Only the first cell that is loaded is loaded as `change` has it."""

    def spoil(scheduler: Any, worker: Any) -> None:
        core, pending = worker._side.worker, [change]
        moves = core._load_moves

        def changed(*arguments: Any) -> Moves:
            found: Moves = list(moves(*arguments))
            return pending.pop()(found) if found and pending else found

        core._load_moves = changed

    return spoil


def _skip(moves: Moves) -> Moves:
    return []


def _shift(moves: Moves) -> Moves:
    """The tokens of one block arrive one slot too late; the last one comes first."""
    return [replace(moves[0], source=memoryview(shifted(_floats(moves[0])).tobytes())), *moves[1:]]


def _flip(moves: Moves) -> Moves:
    """One bit of one float: the smallest change there is."""
    floats = _floats(moves[-1]).copy()
    floats[-1] ^= 1
    return [*moves[:-1], replace(moves[-1], source=memoryview(floats.tobytes()))]


def _exchange(moves: Moves) -> Moves:
    """The blocks of a chunk arrive in another order."""
    return [replace(move, source=other.source) for move, other in zip(moves, reversed(moves), strict=True)]


def stale_load(scheduler: Any, worker: Any) -> None:
    """Every load goes into the blocks of the first one."""
    core, first = worker._side.worker, dict[int, Any]()  # of each group
    moves = core._load_moves
    core._load_moves = lambda cell, view: moves(first.setdefault(cell.group, cell), view)


def _floats(copy: Copy) -> Bits:
    return np.frombuffer(bytes(copy.source), dtype=np.uint32)


def shifted(block: Bits) -> Bits:
    """A block of any number of layers, by the bits of its floats."""
    halves = block.reshape(-1, 2, BLOCK_TOKENS * HEAD)
    keys = np.roll(halves[:, 0].reshape(-1, HEAD, BLOCK_TOKENS), 1, axis=2)
    values = np.roll(halves[:, 1].reshape(-1, BLOCK_TOKENS, HEAD), 1, axis=1)
    return np.stack([keys.reshape(len(halves), -1), values.reshape(len(halves), -1)], axis=1).reshape(-1)


def failed_load(*, told: bool) -> Spoil:
    """Nothing is moved, from the first load on. Not a bug when the engine is `told`."""

    def spoil(scheduler: Any, worker: Any) -> None:
        core = worker._side.worker
        report = core._report_load
        core._load_moves = lambda *arguments: []
        if told:
            core._report_load = lambda job, good: report(job, [False] * len(good))

    return spoil


MUTANTS: dict[str, Spoil] = {
    "one-load-skipped": _first_load(_skip),
    "one-block-shifted": _first_load(_shift),
    "one-float-flipped": _first_load(_flip),
    "two-blocks-exchanged": _first_load(_exchange),
    "stale-load": stale_load,
}
