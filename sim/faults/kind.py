"""`FaultEvent`, one thing that goes wrong in one run, and `Kind`, what can go wrong at all.

Theory of operation
-------------------
A run's faults are a list of `FaultEvent`s. The list is drawn from a seed by `Kind.draw`, kept in the case, cut down by
the shrinker, and carried out by the `Injector`. An event says everything that is not random about it:

    by time   `nth` is 0: the fault begins at `at_ns` and, unless `until_ns` is 0, ends at `until_ns`.
    by count  `nth` is n > 0: the fault is armed at `at_ns` and hits the n-th matching operation from then on (1: the
              next one), once. If `until_ns` comes first it is disarmed.

    armed --at_ns--> begun --takes effect (any number of times): fired--> ended (until_ns, or the end of all faults)

`begin` makes the fault happen and answers how to end it: a call without arguments, made at most once; None says that
nothing lasts. Beginning is not yet an effect: a partition of a connection over which nothing is sent has changed
nothing. A kind calls `Scene.fired` at the moment of each effect, and only then.

`draw` has the configuration's `Shape` and answers no event where the configuration has no such part. It keeps a
minimum time down, so that the fault matters, and a minimum time up before the next event of the same kind on the same
target, so that something is also repaired (`windows`).

Rejected: faults as chances per operation (one operation more, and every later fault is another one: nothing could be
shrunk); faults that are objects with state in the case (not readable, not comparable).

Who holds: the case its events, the injector the endings of those that have begun. Nobody frees a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvcore.sim.streams import RandomStream

if TYPE_CHECKING:
    from kvcore.sim.faults.scene import Scene

MS = 1_000_000
_WINDOWS_MAX = 3


class FaultEvent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """See the module's text. Times are nanoseconds since the episode began.

    `target` names a part of the world: "server0", "worker1>server0" (a client in the network), "server0.file" (an
    adapter, its disk, its executor), "device0", "device0.store" (one of its streams), "scheduler", a request id. "" is
    everything that the kind can act on. The unit of `amount` is the kind's.
    """

    kind: str
    at_ns: int = 0
    until_ns: int = 0
    target: str = ""
    nth: int = 0
    amount: int = 0

    def __str__(self) -> str:
        words = [self.kind, self.target, f"at {_milliseconds(self.at_ns)}"]
        words += [f"until {_milliseconds(self.until_ns)}"] if self.until_ns else []
        words += [f"nth {self.nth}"] if self.nth else []
        words += [f"amount {self.amount}"] if self.amount else []
        return " ".join(filter(None, words))

    @property
    def lasts_ns(self) -> int:
        """How long it lasts; 0: until the faults stop, or not at all."""
        return max(0, self.until_ns - self.at_ns)


def _milliseconds(time_ns: int) -> str:
    whole, rest = divmod(time_ns, MS)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".") + " ms"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a configuration has: all that `draw` may know of it.

    `l2`: the adapters' kinds, the same for each server. `clients`: the names in the network, "scheduler>server0" and so
    on (none in-process). `horizon_ns`: about how long the faults will run. `step_ns`: about one step of the engine.
    """

    servers: int = 1
    ranks: int = 1
    in_process: bool = False
    l2: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    request_ids: tuple[str, ...] = ()
    horizon_ns: int = 40 * MS
    step_ns: int = MS // 4
    load_async: bool = True
    groups: tuple[str, ...] = ("full",)

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes' names: in-process everything is one, which is called "engine"."""
        if self.in_process:
            return ("engine",)
        workers = tuple(f"worker{rank}" for rank in range(self.ranks))
        return ("scheduler", *workers, *self.server_names)

    @property
    def server_names(self) -> tuple[str, ...]:
        return tuple(f"server{index}" for index in range(self.servers))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(f"device{rank}" for rank in range(self.ranks))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters' names, "server0.file" and so on."""
        return tuple(f"{server}.{kind}" for server in self.server_names for kind in self.l2)


End = Callable[[], None]
Draw = Callable[[RandomStream, Shape], list[FaultEvent]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. `about` says in one line what goes wrong and what `amount` counts.

    `common`: it must fire in a swarm of 500 runs. `begin` may be called with any event of this kind, drawn or written
    by hand.
    """

    name: str
    about: str
    draw: Draw
    begin: Callable[[Scene, FaultEvent], End | None]
    common: bool = True

    def __post_init__(self) -> None:
        assert self.name.count(".") == 1, f"{self.name}: a kind is named plane.what"

    @property
    def plane(self) -> str:
        return self.name.partition(".")[0]


def moment(stream: RandomStream, shape: Shape) -> int:
    """When a fault begins. Early more often than late: requests may be served long before the horizon."""
    return stream.random_ns(0, shape.horizon_ns // stream.pick((1, 2, 8)))


def windows(
    stream: RandomStream, shape: Shape, down_ns: tuple[int, int], up_ns: tuple[int, int]
) -> list[tuple[int, int]]:
    """One to three spans (begin, end) that do not touch: each lasts within `down_ns`, and before the next one begins a
    time within `up_ns` passes. The first begins at a `moment`; others only while the horizon lasts."""
    begin_ns = moment(stream, shape)
    spans: list[tuple[int, int]] = []
    for _ in range(stream.randint(1, _WINDOWS_MAX)):
        if spans and begin_ns >= shape.horizon_ns:
            break
        end_ns = begin_ns + max(1, stream.tail_ns(*down_ns))
        spans.append((begin_ns, end_ns))
        begin_ns = end_ns + max(1, stream.random_ns(*up_ns))
    return spans


def lasting(
    name: str,
    stream: RandomStream,
    shape: Shape,
    targets: Sequence[str],
    *,
    down_ns: tuple[int, int],
    up_ns: tuple[int, int],
    amount: tuple[int, int] = (0, 0),
) -> list[FaultEvent]:
    """Events of kind `name` that last, on one of the `targets`; none where there is no target."""
    if not targets:
        return []
    target = stream.pick(targets)
    return [
        FaultEvent(name, begin, end, target, amount=stream.tail_ns(*amount))
        for begin, end in windows(stream, shape, down_ns, up_ns)
    ]


def counted(
    name: str,
    stream: RandomStream,
    shape: Shape,
    targets: Sequence[str],
    *,
    nth: tuple[int, int],
    amount: tuple[int, int] = (0, 0),
) -> list[FaultEvent]:
    """One event of kind `name` that hits the n-th operation from a drawn moment on; none where there is no target."""
    if not targets:
        return []
    at_ns = moment(stream, shape)
    return [FaultEvent(name, at_ns, 0, stream.pick(targets), stream.tail_ns(*nth), stream.tail_ns(*amount))]
