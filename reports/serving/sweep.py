"""Many simulations: cells of a table, in several processes, with what is done kept when somebody stops it.

A cell is a trace and a setting. Every process gets each different trace once. Results come in the order of the cells,
whatever process was faster; the same cells give the same results with any number of jobs. Ctrl-C ends the sweep: the
result holds the cells that were done, in order, and names those that are missing.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool

from kvcore.reports.numbers import check_count
from kvcore.reports.serving.result import ServingResult
from kvcore.reports.serving.setting import Setting
from kvcore.reports.serving.simulation import simulate
from kvcore.reports.traces.trace import Trace

JOBS_MAX = 256
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep."""

    trace: Trace
    setting: Setting


@dataclass(frozen=True, slots=True)
class Sweep:
    """The first results, in the order of the cells. `missing`: cells that an interruption left undone."""

    results: tuple[ServingResult, ...]
    missing: tuple[Cell, ...] = ()


def sweep(cells: Sequence[Cell], jobs: int = 1, progress: Progress | None = None) -> Sweep:
    """Run all cells. `progress(done, of)` is called after each."""
    check_count("jobs", jobs, 1, JOBS_MAX)
    done: list[ServingResult] = []
    try:
        for result in _in_this_process(cells) if jobs == 1 or len(cells) < 2 else _in_others(cells, jobs):
            done.append(result)
            if progress is not None:
                progress(len(done), len(cells))
    except KeyboardInterrupt:
        return Sweep(tuple(done), tuple(cells[len(done) :]))
    return Sweep(tuple(done))


def _in_this_process(cells: Sequence[Cell]) -> Iterator[ServingResult]:
    return (simulate(cell.trace, cell.setting) for cell in cells)


def _in_others(cells: Sequence[Cell], jobs: int) -> Iterator[ServingResult]:
    traces: list[Trace] = []
    tasks = []
    for cell in cells:
        at = next((at for at, trace in enumerate(traces) if trace is cell.trace), len(traces))
        if at == len(traces):
            traces.append(cell.trace)
        tasks.append((at, cell.setting))
    with _pool(min(jobs, len(cells)), traces) as pool:
        yield from pool.imap(_simulate, tasks)


def _pool(jobs: int, traces: list[Trace]) -> Pool:
    """Ctrl-C is for the process that collects. The others inherit it blocked: they would meet it while they import."""
    resource_tracker.ensure_running()  # its first start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        return multiprocessing.get_context("spawn").Pool(jobs, _begin, (traces,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_traces: list[Trace] = []  # of a process that works for a sweep


def _begin(traces: list[Trace]) -> None:
    _traces.extend(traces)


def _simulate(task: tuple[int, Setting]) -> ServingResult:
    return simulate(_traces[task[0]], task[1])
