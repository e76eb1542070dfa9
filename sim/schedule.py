"""Tie policies: which of the entries that are ready at one instant runs next.

A policy answers one question, `choose(ready) -> index`, and is asked only when at least two entries are ready. `ready`
is in order of arrival, so index 0 is always "first in, first out" and a recorded list of (tie number, index) replays
a schedule on any policy's run. That is what the shrinker works on: first in, first out except at these ties.

    RandomTies     uniform among what is ready. Not random keys in a heap: an entry with a bad key would starve.
    FifoTies       first in, first out: what asyncio promises and what hides races.
    PriorityTies   random priorities per task with few change points (Burckhardt et al., "A randomized scheduler with
                   probabilistic guarantees of finding bugs", ASPLOS 2010): finds races that need few but well-placed
                   switches. The ready entry of the highest priority runs; at each of `change_points` ties whoever
                   would run falls below everybody else. Since the length of a run is not known, the change points are
                   uniform in magnitude. There is one more every `PATIENCE` ties, so that tasks that poll at one
                   instant cannot starve the rest for ever.
    ReplayTies     first in, first out except at the ties named.
    LayeredTies    any policy, with layers that come and go while the loop runs: each sees what is ready and may ask the
                   one below. A recorder stands above all layers, so that a replay needs none of them; over a replay
                   layers have no effect.
    Starvation     a layer: whoever matches is never picked while anybody else is ready, for a bounded number of ties.

A policy is held by its loop and is good for one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from kvcore.sim.streams import RandomStream

PATIENCE = 5_000
_CHANGE_BITS_MIN = 3
_CHANGE_BITS_MAX = 16


class ReadyEntry(Protocol):
    """What a policy may know of an entry."""

    @property
    def sequence(self) -> int: ...

    @property
    def actor(self) -> int | None:
        """The sequence number of the task that the entry belongs to; None: a plain callback."""
        ...


class TiePolicy(Protocol):
    def choose(self, ready: Sequence[ReadyEntry]) -> int: ...


class RandomTies:
    """Uniform among what is ready."""

    __slots__ = ("_getrandbits",)

    def __init__(self, stream: RandomStream) -> None:
        self._getrandbits = stream.getrandbits

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        count = len(ready)
        bits = (count - 1).bit_length()
        index = self._getrandbits(bits)
        while index >= count:
            index = self._getrandbits(bits)
        return index


class FifoTies:
    """First in, first out."""

    __slots__ = ()

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        return 0


class PriorityTies:
    """Random task priorities, changed at few points."""

    __slots__ = ("_changes", "_floor", "_known", "_priorities", "_stream", "on_switch", "ties")

    def __init__(self, stream: RandomStream, change_points: int) -> None:
        self._stream = stream
        self._priorities: dict[int, int] = {}  # by actor
        self._known: dict[int, int] = {}  # by entry, while it is ready: finding an entry's task is slow
        self._changes = {
            1 + stream.getrandbits(stream.randint(_CHANGE_BITS_MIN, _CHANGE_BITS_MAX)) for _ in range(change_points)
        }  # asked only for membership, never iterated
        self._floor = 0
        self.on_switch: Callable[[], None] | None = None  # a demotion has changed who runs
        self.ties = 0

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        index = self._highest(ready)
        self.ties += 1
        if self.ties in self._changes or self.ties % PATIENCE == 0:
            would_run = index
            self._demote(ready[index].actor)
            index = self._highest(ready)
            if index != would_run and self.on_switch is not None:
                self.on_switch()
        self._known.pop(ready[index].sequence)
        return index

    def _highest(self, ready: Sequence[ReadyEntry]) -> int:
        known = self._known
        best, best_priority = 0, self._floor - 1
        for index, entry in enumerate(ready):
            priority = known.get(entry.sequence)
            if priority is None:
                priority = known[entry.sequence] = self._priority(entry.actor)
            if priority > best_priority:
                best, best_priority = index, priority
        return best

    def _priority(self, actor: int | None) -> int:
        """A plain callback (a timer, a delivery) has no identity to keep a priority for: it draws its own."""
        if actor is None:
            return self._stream.getrandbits(32)
        priority = self._priorities.get(actor)
        if priority is None:
            priority = self._priorities[actor] = self._stream.getrandbits(32)
        return priority

    def _demote(self, actor: int | None) -> None:
        if actor is not None:
            self._floor -= 1
            self._priorities[actor] = self._floor
        self._known.clear()


class ReplayTies:
    """First in, first out, except that at tie number `k` the entry at `exceptions[k]` runs."""

    __slots__ = ("_exceptions", "ties")

    def __init__(self, exceptions: Mapping[int, int]) -> None:
        self._exceptions = dict(exceptions)
        self.ties = 0

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        index = self._exceptions.get(self.ties, 0)
        self.ties += 1
        return min(index, len(ready) - 1)


class RecordingTies:
    """Any policy, with every choice other than first in, first out written down for `ReplayTies`."""

    __slots__ = ("exceptions", "inner", "ties")

    def __init__(self, inner: TiePolicy) -> None:
        self.inner = inner
        self.exceptions: dict[int, int] = {}
        self.ties = 0

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        index = self.inner.choose(ready)
        if index:
            self.exceptions[self.ties] = index
        self.ties += 1
        return index


Choose = Callable[[Sequence[ReadyEntry]], int]
Layer = Callable[[Choose, Sequence[ReadyEntry]], int]
"""(how the policy below would choose, ready) -> index."""


class LayeredTies:
    """A policy and the layers over it; the one added last is asked first."""

    __slots__ = ("_base", "_layers", "choose")

    choose: Choose

    def __init__(self, base: TiePolicy) -> None:
        self._base = base
        self._layers: dict[int, Layer] = {}
        self.choose = base.choose

    def add(self, layer: Layer) -> Callable[[], None]:
        """The answer takes the layer away again."""
        if isinstance(self._base, ReplayTies):
            return lambda: None  # what is replayed has the layers' choices in it
        number = max(self._layers, default=0) + 1
        self._layers[number] = layer
        self._stack()

        def remove() -> None:
            self._layers.pop(number, None)
            self._stack()

        return remove

    def _stack(self) -> None:
        choose: Choose = self._base.choose
        for layer in self._layers.values():
            choose = partial(layer, choose)
        self.choose = choose


class Starvation:
    """A layer: entries for which `starved` is true run only when nothing else is ready, for `ties` of the ties in which
    one was passed over. `on_pass` is called at each of those."""

    __slots__ = ("_on_pass", "_starved", "ties")

    def __init__(self, starved: Callable[[ReadyEntry], bool], ties: int, on_pass: Callable[[], None]) -> None:
        self._starved = starved
        self._on_pass = on_pass
        self.ties = ties

    def __call__(self, below: Choose, ready: Sequence[ReadyEntry]) -> int:
        if self.ties <= 0:
            return below(ready)
        others = [index for index, entry in enumerate(ready) if not self._starved(entry)]
        if not others or len(others) == len(ready):
            return below(ready)
        self.ties -= 1
        self._on_pass()
        return others[below([ready[index] for index in others]) if len(others) > 1 else 0]


def layered(policy: TiePolicy) -> tuple[TiePolicy, LayeredTies]:
    """The policy with room for layers, and where to add them: below a recorder, if it has one."""
    if isinstance(policy, RecordingTies):
        policy.inner, layers = layered(policy.inner)
        return policy, layers
    if isinstance(policy, LayeredTies):
        return policy, policy
    layers = LayeredTies(policy)
    return layers, layers


def make_policy(schedule: str, stream: RandomStream, change_points: int) -> TiePolicy:
    """The policy named "random", "fifo" or "priority"."""
    if schedule == "random":
        return RandomTies(stream)
    if schedule == "fifo":
        return FifoTies()
    assert schedule == "priority", schedule
    return PriorityTies(stream, change_points)
