"""Measures many mutants, one after the other or in worker processes.

Each mutant is measured in one process from beginning to end; a child plants it in itself, so that mutants never meet.
The slow ones (hard and safe: they use their whole budget) go first, so that the processes end together.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from kvcore.ladder.zoo.catalogue import ZOO
from kvcore.ladder.zoo.measure import Effort, Measured, measure
from kvcore.ladder.zoo.patch import Patch
from kvcore.ladder.zoo.result import ZooResult

_SLOW_FIRST = {"safe": 0, "hard": 1, "bug": 2}


def measure_all(names: Sequence[str], effort: Effort, jobs: int, progress: Callable[[str], None]) -> ZooResult:
    """Raises `ConfigError`, before anything has run, if a mutant does not fit the production code any more."""
    for name in names:
        patch = Patch()
        patch.rewrite(ZOO[name].edits)
        patch.undo()
    order = sorted(names, key=lambda name: _SLOW_FIRST[ZOO[name].kind])
    found: dict[str, Measured] = {}
    for measured in _measured(order, effort, jobs):
        found[measured.mutant.name] = measured
        progress(f"[{len(found)}/{len(names)}] {describe(measured)}")
    return ZooResult([found[name] for name in names], whole=len(names) == len(ZOO))


def describe(measured: Measured) -> str:
    """One line of progress."""
    seen = f"[{measured.oracle}] at seed {measured.first_seed}" if measured.catches else "not caught"
    return (
        f"{measured.mutant.name} ({measured.mutant.kind}): {seen}, {measured.density:.0f} per 1,000 in "
        f"{measured.seeds_run} seeds, {measured.cpu_s:.0f} s CPU{'; ' if measured.problem else ''}{measured.problem}"
    )


def _measured(names: Sequence[str], effort: Effort, jobs: int) -> Iterator[Measured]:
    if jobs <= 1 or len(names) == 1:
        for name in names:
            yield measure(name, effort)
        return
    with ProcessPoolExecutor(min(jobs, len(names)), multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(measure, name, effort) for name in names]
        for future in as_completed(pending):
            yield future.result()
