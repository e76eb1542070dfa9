"""Rounds: in each, every piece and every run is timed once, in an order of its own.

Theory of operation
-------------------
The load on a machine changes within seconds, and with it what a core achieves. If the pieces are measured first and the
runs later, the prediction is of another machine than the one that runs. So each round holds all of them, shuffled with
the seed and the number of the round, and a figure is the median over the rounds: what changed from round to round has
changed for the pieces and the runs alike, and nothing has the same neighbour in the order twice.

A round counts when it is complete; an interrupt in it leaves those before as they are. Any two or more make a report.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcore.reports.calibration.engine import CalibrationEngine, MeasuringBug, Way, tokens_max
from kvcore.reports.calibration.prediction import Laws, Point, fit_laws, halves
from kvcore.reports.calibration.stopwatch import Timed
from kvcore.sim.streams import RandomStream

TIERS: tuple[Way, ...] = ("L1", "L2")
WAYS: tuple[Way, ...] = ("recompute", *TIERS)
PIECES = (16, 48, 96, 144, 208, 304, 416, 496)
END_TOKENS = 208  # a load's end hardly depends on its length
ROUNDS_LEAST = 2  # one for each half
DECIMALS = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """What is timed: a prefill of `new` tokens after `prefix`, a load of `prefix` tokens, a call of the cache after
    such a load (at once, or when it rests), or the run of a whole request."""

    kind: Literal["prefill", "load", "call after load", "call at rest", "run"]
    way: Way = "recompute"
    prefix: int = 0
    new: int = 0


@dataclass(slots=True)
class Rounds:
    """What complete rounds have measured: seconds by shape, one of each round, and the records."""

    prefixes: Sequence[int]
    rest: int
    seed: int
    done: int = 0
    times: dict[Shape, list[float]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    _tokens: dict[int, int] = field(default_factory=dict)

    def run(self, engine: CalibrationEngine) -> None:
        """One more round. MeasuringBug if the first token depends on how the KV came."""
        todo = self._shapes()
        RandomStream(self.seed, f"reports.calibration.round{self.done}").shuffle(todo)
        found = [(shape, self._time(engine, shape)) for shape in todo]
        for shape, time in found:
            self.times.setdefault(shape, []).append(time.seconds)
            self.records.append(_record(self.done, shape, time))
        self.done += 1

    def _shapes(self) -> list[Shape]:
        shapes = [Shape("prefill", new=new) for new in PIECES]
        shapes += [Shape("prefill", prefix=at, new=self.rest) for at in PIECES if at + self.rest <= tokens_max()]
        for tier in TIERS:
            shapes += [Shape("load", tier, tokens) for tokens in PIECES]
            shapes += [Shape("call after load", tier, END_TOKENS), Shape("call at rest", tier, END_TOKENS)]
        return shapes + [Shape("run", way, prefix, self.rest) for prefix in self.prefixes for way in WAYS]

    def _time(self, engine: CalibrationEngine, shape: Shape) -> Timed:
        if shape.kind == "prefill":
            return engine.time_prefill(shape.new, shape.prefix)
        if shape.kind == "load":
            return engine.time_load(shape.way, shape.prefix)
        if shape.kind != "run":
            return engine.time_call(shape.way, shape.prefix, rested=shape.kind == "call at rest")
        time, token = engine.time_first_token(shape.way, shape.prefix, shape.new)
        if self._tokens.setdefault(shape.prefix, token) != token:
            raise MeasuringBug(f"the first token after {shape.prefix} tokens depends on how the KV came")
        return time

    # ---- what the rounds so far say

    def laws(self) -> Laws:
        """Fitted to the pieces."""
        whole = [(s.new, seconds) for s, seconds in self._middle("prefill") if not s.prefix]
        after = [(s.prefix, seconds) for s, seconds in self._middle("prefill") if s.prefix]
        loads: dict[str, list[tuple[int, float]]] = {tier: [] for tier in TIERS}
        for shape, seconds in self._middle("load"):
            loads[shape.way].append((shape.prefix, seconds))
        called, rested = (
            {s.way: seconds for s, seconds in self._middle(kind)} for kind in ("call after load", "call at rest")
        )
        return fit_laws(whole, after, loads, {tier: max(0.0, called[tier] - rested[tier]) for tier in TIERS})

    def _middle(self, kind: str) -> list[tuple[Shape, float]]:
        """Medians over the rounds."""
        return [(shape, statistics.median(times)) for shape, times in self.times.items() if shape.kind == kind]

    def points(self, laws: Laws) -> list[Point]:
        """All predictions beside their runs."""
        return [self._point(laws, way, prefix) for prefix in self.prefixes for way in WAYS]

    def _point(self, laws: Laws, way: Way, prefix: int) -> Point:
        times = self.times[Shape("run", way, prefix, self.rest)]
        a, again = halves(times)
        return Point(way, prefix, laws.ttft_s(way, prefix, self.rest), a, again, len(times))


def _record(number: int, shape: Shape, time: Timed) -> dict[str, Any]:
    return {
        "round": number,
        "kind": shape.kind,
        "way": shape.way,
        "prefix_tokens": shape.prefix,
        "new_tokens": shape.new,
        "seconds": round(time.seconds, DECIMALS),
        "clock_seconds": round(time.clock_s, DECIMALS),
    }
