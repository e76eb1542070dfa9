"""Faults of plane L1: memory that is not there when it is wanted.

All of it happens through L1's own calls, as if another tenant had come: foreign staging that takes room, foreign leases
that pin. So its books stay true at every moment. Only "no room at the n-th allocation" stands between L1 and its
memory (`TightRoom`).

What others hold is given back when the fault ends; a server that restarts has lost it with everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from kvcore.answers import Answer
from kvcore.keys import ObjectKey
from kvcore.l1_room import Room
from kvcore.leases import Owner
from kvcore.memory import ALIGNMENT_BYTES, Slot
from kvcore.sim.faults.kind import MS, Draw, End, FaultEvent, Kind, Shape, counted, lasting
from kvcore.sim.faults.scene import Scene, ServerHooks
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.ports.owner import Owner as Life
from kvcore.sim.streams import RandomStream

DOWN_NS = (4 * MS, 60 * MS)
UP_NS = (2 * MS, 10 * MS)
HOLES_MAX = 64
_FOREIGN_MODEL = "somebody else"


class TightRoom(Room):
    """A `Room` whose allocations can be refused one by one. Takes over the state of the room it replaces."""

    def __init__(self, room: Room) -> None:
        self.__dict__ = room.__dict__
        self.refusals: list[Callable[[], bool]] = []

    def obtain(self, wanted: Mapping[ObjectKey, int], sizes: int | Sequence[int]) -> list[Slot | None]:
        refused = {key for key in wanted if [None for refuses in tuple(self.refusals) if refuses()]}
        if not refused:
            return super().obtain(wanted, sizes)
        granted = {key: place for key, place in wanted.items() if key not in refused}
        slots = iter(super().obtain(granted, sizes) if granted else [])
        return [None if key in refused else next(slots) for key in wanted]


class L1Site:
    """The L1 of one life of a server. What is done to it is done as code of the server's process."""

    def __init__(self, scene: Scene, server: ServerHooks) -> None:
        self.l1: Any = server.l1
        self._life = Life(scene.world.process(server.name))
        if not isinstance(self.l1._room, TightRoom):
            self.l1._room = TightRoom(self.l1._room)
        self.room: TightRoom = self.l1._room

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` as the server. Nothing happens, and None is answered, when this life has ended."""
        return self._life.call(function, *args) if self._life.alive else None


def sites_of(scene: Scene, target: str) -> list[L1Site]:
    """The L1 of the server called `target` ("": of all) that is up."""
    return [
        L1Site(scene, server)
        for server in scene.stack.servers
        if target in ("", server.name) and scene.world.process(server.name).alive
    ]


class Squatter(ABC):
    """Somebody else who takes room by staging objects of his own and never publishes them.

    What he cannot get at once he takes as soon as there is room, before each allocation of others.
    """

    def __init__(self, scene: Scene, event: FaultEvent, site: L1Site) -> None:
        self._scene = scene
        self._event = event
        self._site = site
        self._tag = f"fault:{event.kind}:{event.target}:{event.at_ns}"
        self._stream = scene.stream(event)
        self._numbers = count()
        self._busy = False
        self.capacity_bytes: int = site.l1.statistics().bytes_capacity
        self.left_bytes = 0
        self.held: list[ObjectKey] = []

    def begin(self) -> End:
        self._site.call(self._take_again)
        self._site.room.refusals.append(self._take_again)
        return self.leave

    def leave(self) -> None:
        self._site.room.refusals.remove(self._take_again)
        self._site.call(self.give_back, list(self.held))

    @abstractmethod
    def take_more(self, stream: RandomStream) -> None:
        """Take what is still wanted and can be had."""

    def _take_again(self) -> bool:
        if not self._busy and self.left_bytes >= ALIGNMENT_BYTES:
            self._busy = True
            before = len(self.held)
            self.take_more(self._stream)
            self._busy = False
            if len(self.held) > before:
                self._scene.fired(self._event)
        return False

    def take(self, size: int) -> bool:
        """Stage one object of `size` bytes; L1 evicts for it as for anybody. False: there is no room."""
        name = next(self._numbers).to_bytes(32, "big")
        key = ObjectKey(name, _FOREIGN_MODEL, 0, 0, "")
        answers, _ = self._site.l1.reserve_write(self._tag, [key], size)
        if answers[0] is not Answer.RESERVED:
            return False
        self.held.append(key)
        self.left_bytes -= size
        return True

    def give_back(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.held.remove(key)
        self._site.l1.abort_write(self._tag, list(keys))


class HoleMaker(Squatter):
    """Cuts `amount` of 1000 of the memory into pieces of odd sizes and gives every second one back."""

    def __init__(self, scene: Scene, event: FaultEvent, site: L1Site) -> None:
        super().__init__(scene, event, site)
        self.left_bytes = self.capacity_bytes * event.amount // 1000

    def take_more(self, stream: RandomStream) -> None:
        largest = max(1, 2 * self.capacity_bytes // HOLES_MAX // ALIGNMENT_BYTES)
        first = len(self.held)
        while len(self.held) < HOLES_MAX:
            size = ALIGNMENT_BYTES * stream.randint(1, largest)
            if size > self.left_bytes or not self.take(size):
                break
        self.give_back(self.held[first + 1 :: 2])


class Hoarder(Squatter):
    """Takes all memory but `amount` of 1000, in halves of what is still to be taken."""

    def __init__(self, scene: Scene, event: FaultEvent, site: L1Site) -> None:
        super().__init__(scene, event, site)
        self.left_bytes = self.capacity_bytes - self.capacity_bytes * event.amount // 1000

    def take_more(self, stream: RandomStream) -> None:
        size = self.left_bytes
        while size >= ALIGNMENT_BYTES and self.left_bytes >= ALIGNMENT_BYTES:
            size = min(size, self.left_bytes) & -ALIGNMENT_BYTES
            if not self.take(size):
                size //= 2


# ---- how each begins


def _squatting(squatter: Callable[[Scene, FaultEvent, L1Site], Squatter]) -> Callable[[Scene, FaultEvent], End | None]:
    def begin(scene: Scene, event: FaultEvent) -> End | None:
        return _all(squatter(scene, event, site).begin() for site in sites_of(scene, event.target))

    return begin


def _all(endings: Iterator[End]) -> End | None:
    made = list(endings)

    def end() -> None:
        for ending in made:
            ending()

    return end if made else None


def _no_space_nth(scene: Scene, event: FaultEvent) -> End | None:
    trigger = Trigger(scene, event)

    def refuse(site: L1Site) -> End:
        refusal = trigger.hits
        site.room.refusals.append(refusal)
        return lambda: site.room.refusals.remove(refusal)

    return _all(refuse(site) for site in sites_of(scene, event.target))


class _Pin:
    """Leases everything that is resident, and before each allocation what has come since."""

    def __init__(self, scene: Scene, event: FaultEvent, site: L1Site) -> None:
        self._scene = scene
        self._event = event
        self._site = site
        self._owner = Owner(f"fault:{event.target}:{event.at_ns}", 0, "pin")
        self._pinned: dict[Slot, None] = {}
        site.call(self.pin)
        site.room.refusals.append(self._before_allocation)

    def pin(self) -> None:
        l1 = self._site.l1
        fresh = [key for key in l1.resident_keys() if l1.slot_of(key) not in self._pinned]
        if not fresh:
            return
        self._scene.fired(self._event)
        l1.reserve_read(self._owner, fresh)
        self._pinned.update(dict.fromkeys(l1.slot_of(key) for key in fresh))

    def _before_allocation(self) -> bool:
        self.pin()
        return False

    def end(self) -> None:
        self._site.room.refusals.remove(self._before_allocation)
        self._pinned.clear()
        self._site.call(self._site.l1.release_owner, self._owner)


def _pinned(scene: Scene, event: FaultEvent) -> End | None:
    return _all(_Pin(scene, event, site).end for site in sites_of(scene, event.target))


# ---- the kinds


def _for_a_while(name: str, amount: tuple[int, int] = (0, 0)) -> Draw:
    def draw(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
        return lasting(name, stream, shape, shape.server_names, down_ns=DOWN_NS, up_ns=UP_NS, amount=amount)

    return draw


def _draw_no_space(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    events: list[FaultEvent] = []
    for _ in range(stream.randint(1, 3)):
        events += counted("l1.no_space_nth", stream, shape, shape.server_names, nth=(1, 12))
    return events


KINDS = (
    Kind(
        "l1.no_space_nth",
        "the n-th allocation finds no room (by time: none does)",
        _draw_no_space,
        _no_space_nth,
    ),
    Kind(
        "l1.fragmentation",
        "somebody else holds pieces of odd sizes with holes between them, in `amount` of 1000 of the memory",
        _for_a_while("l1.fragmentation", (300, 1000)),
        _squatting(HoleMaker),
    ),
    Kind(
        "l1.pinned",
        "somebody else has a lease on everything that is resident, so nothing can be evicted",
        _for_a_while("l1.pinned"),
        _pinned,
    ),
    Kind(
        "l1.tiny",
        "somebody else holds all of the memory but `amount` of 1000",
        _for_a_while("l1.tiny", (0, 200)),
        _squatting(Hoarder),
    ),
)
