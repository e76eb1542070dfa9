"""What a benchmark of a store says about its bar.

A bar is what a store promises on a machine that has nothing else to do: so much of the speed of the calls it is built
on. It is judged by the clock. A miss is told twice, where it happens and among the warnings at the end, together with
the ratio of processor seconds, which says whether the code or the machine was slow, and with the machine's load. It
does not fail the run, because a busy machine misses with any code; what does is a ratio that is below `LEAST` of the
bar by both measures, which no load of others explains. Asserted only with `--benchmark-only`, and where both are known.
"""

from __future__ import annotations

import gc
import os
import warnings

import pytest

LEAST = 0.7
COLLECT_AFTER = (10_000, 20, 20)  # as the server has it


@pytest.fixture
def collector():
    """The collector of garbage as `kvcore serve` sets it."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT_AFTER)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def bar(request, capsys):
    """`bar(what, promised, clock, work)`: ratios to the other side; `work` by processor seconds, None: unknown."""

    def judge(what, promised, clock, work=None):
        by_work = "" if work is None else f", {work:.2f} by processor seconds"
        holds = clock >= promised
        text = f"{what}: {clock:.2f} by the clock{by_work}; its bar is {promised:.2f}"
        with capsys.disabled():
            print(f"\n  {'holds ' if holds else 'MISSES'} {text}")
        if not holds:
            text = f"MISSES its bar: {text} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors)"
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn(text, stacklevel=2)
        if work is not None and request.config.getoption("benchmark_only"):
            assert max(clock, work) >= LEAST * promised

    return judge
