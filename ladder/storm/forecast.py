"""The forecast: what a storm will do, to whom and when, drawn from its seed alone.

A storm has rounds. The kinds of events are dealt to them from a shuffled deck, so that after one deck every kind has
come, and at most `_ENGINE_DEATHS_MAX` events of a round end the engine (starting one takes seconds). An event
begins `at_s` after its round, or at the next moment of its kind after that (`tap.MOMENTS`): a kill that waits for a
load to be under way hits one far more often than a kill on the clock.

Seconds are real ones. What the processes are doing when an event comes is not in the forecast.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvcore.sim.workload import Draws

EVENTS_PER_ROUND = 6
ROUND_SECONDS = 6.0
_ENGINE_DEATHS_MAX = 1


@dataclass(frozen=True, slots=True)
class Kind:
    """`lasts_ms`: shortest and longest. `moments`: what it waits for, in turn. `engine_dies`: it ends an engine."""

    name: str
    about: str
    moments: tuple[str, ...]
    lasts_ms: tuple[int, int] = (0, 0)
    engine_dies: bool = False
    per_deck: int = 1


KINDS = (
    Kind(
        "server.kill", "kill -9; a new life on the same files", ("loading", "storing", "looking"), (0, 800), per_deck=2
    ),
    Kind("server.power", "kill -9, and files that were not flushed are torn", ("storing", "any"), (0, 800)),
    Kind("server.term", "SIGTERM with work outstanding: ends in time, exit 0", ("storing", "loading"), (0, 400)),
    Kind("server.freeze", "SIGSTOP, later SIGCONT", ("storing", "loading"), (200, 3000)),
    Kind("worker.kill", "kill -9", ("storing", "loading"), engine_dies=True, per_deck=2),
    Kind("worker.freeze", "SIGSTOP, later SIGCONT", ("storing", "loading"), (200, 3000)),
    Kind("scheduler.kill", "kill -9", ("looking", "loading"), engine_dies=True),
    Kind("scheduler.freeze", "SIGSTOP, later SIGCONT", ("looking", "any"), (200, 3000)),
    Kind("link.cut", "all connections end", ("talking", "storing", "loading")),
    Kind("link.truncate", "a message stops in its middle, then the end", ("any",)),
    Kind("link.half", "one direction is swallowed, then the end", ("talking", "loading"), (300, 3000)),
    Kind("link.slow", "small pieces, each delayed", ("any",), (1000, 3000)),
    Kind("link.stall", "nothing moves, then everything does", ("talking", "storing"), (300, 3000)),
    Kind("link.refuse", "all connections end, new ones are refused", ("talking", "loading"), (300, 1500)),
)
BY_NAME = {kind.name: kind for kind in KINDS}
DECK = tuple(kind.name for kind in KINDS for _ in range(kind.per_deck))


SHORT_DECK = tuple(name for name in dict.fromkeys(DECK) if name not in ("link.slow", "link.refuse"))
"""For a minute: every process is killed, stopped and told to end once."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that will happen. `target` counts servers or workers, modulo how many there are."""

    kind: str
    at_s: float
    moment: str
    target: int
    lasts_s: float
    number: int  # unique in its storm; detail is drawn from it

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        when = "" if self.moment == "any" else f", when {self.moment}"
        return f"{self.at_s:4.1f} s {self.kind} #{self.target}{lasts}{when}"


class Forecast:
    """Rounds of one seed, one after the other, without an end."""

    def __init__(self, seed: int, deck: tuple[str, ...] = DECK) -> None:
        self._draws = Draws(seed, "storm")
        self._kinds = deck
        self._deck: list[str] = []
        self._number = 0
        self._times: Counter[str] = Counter()

    def round(self) -> tuple[Event, ...]:
        """The next round, in the order of time."""
        events = [self._event(name) for name in self._deal()]
        return tuple(sorted(events, key=lambda event: event.at_s))

    def _deal(self) -> list[str]:
        """The first of the deck that still may come into this round."""
        if len(self._deck) < EVENTS_PER_ROUND:
            self._deck += self._shuffled()
        dealt: list[str] = []
        for name in list(self._deck):
            deaths = sum(BY_NAME[other].engine_dies for other in dealt)
            if len(dealt) < EVENTS_PER_ROUND and not (BY_NAME[name].engine_dies and deaths >= _ENGINE_DEATHS_MAX):
                dealt.append(name)
                self._deck.remove(name)
        return dealt

    def _shuffled(self) -> list[str]:
        left = list(self._kinds)
        return [left.pop(self._draws.below(len(left))) for _ in range(len(left))]

    def _event(self, name: str) -> Event:
        kind, draws = BY_NAME[name], self._draws
        self._number += 1
        self._times[name] += 1
        return Event(
            name,
            draws.below(int(ROUND_SECONDS * 1000)) / 1000,
            kind.moments[(self._times[name] - 1) % len(kind.moments)],
            draws.below(12),
            draws.between(*kind.lasts_ms) / 1000,
            self._number,
        )
