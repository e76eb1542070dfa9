"""L2 faults of the store itself: no room, no writing, and records that are not what was stored.

Damage comes in two ways. By count it strikes a record at the very moment when it is about to be read. By time it
strikes once, when the fault begins, `amount` of 1000 records (at least one), as the machine finds them at its next
read or its next start; where there is none yet, the first one that is written.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection

from kvcore.keys import ObjectKey
from kvcore.sim import damage
from kvcore.sim.faults.kind import Draw, End, FaultEvent, Kind, Shape
from kvcore.sim.faults.l2_attach import Attach, by_count, either, everywhere, for_a_while, hooked, throughout
from kvcore.sim.faults.l2_calls import store_error
from kvcore.sim.faults.l2_site import L2Site
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.streams import RandomStream
from kvcore.sim.unreliable import RecordHook

Spoil = Callable[[ObjectKey, bytes, int], bytes]
"""(key, record, place) -> what the medium holds instead."""

_PLACE_BITS = 32


# ---- calls that fail


class _RefuseRecords(RecordHook):
    """Fails record operations; where there is no disk below."""

    def __init__(self, trigger: Trigger, operations: Collection[str], number: int) -> None:
        self._trigger = trigger
        self._operations = operations
        self._number = number

    def before(self, operation: str, key: ObjectKey) -> None:
        if operation in self._operations and self._trigger.hits():
            raise store_error(self._number)


def _refusing(number: int, records: Collection[str], files: Collection[str]) -> Attach:
    """Operations end with error `number`: those named `files` of a disk, or `records` where there is none."""

    def attach(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
        if site.files is None:
            return hooked(site.backend.hooks, _RefuseRecords(trigger, records, number))

        def hook(kind: str, names: tuple[str, ...]) -> int | None:
            return number if kind in files and trigger.hits() else None

        return hooked(site.files.hooks, hook)

    return attach


# ---- bytes that are wrong


class _Damage(RecordHook):
    """Spoils records; see the module's text."""

    def __init__(self, site: L2Site, trigger: Trigger, stream: RandomStream, spoil: Spoil) -> None:
        self._site = site
        self._trigger = trigger
        self._stream = stream
        self._spoil = spoil
        self._waits = trigger.event.nth == 0

    def at_once(self) -> None:
        """By time: what is there when the fault begins."""
        keys = self._site.known_keys() if self._waits else []
        if not keys:
            return
        sure = self._stream.sample_index(len(keys))
        for position, key in enumerate(keys):
            if position == sure or self._stream.chance(self._trigger.event.amount, 1000):
                self._strike(key, lambda: True)

    def before(self, operation: str, key: ObjectKey) -> None:
        if operation == "read" and self._trigger.event.nth:
            self._strike(key, self._trigger.comes)

    def after(self, operation: str, key: ObjectKey) -> None:
        if operation == "write" and self._waits:
            self._strike(key, lambda: True)

    def _strike(self, key: ObjectKey, is_the_one: Callable[[], bool]) -> None:
        record = self._site.medium.read(key)
        if record is None:
            return
        spoiled = self._spoil(key, record, self._stream.getrandbits(_PLACE_BITS))
        if spoiled == record or not is_the_one():
            return
        self._waits = False
        self._trigger.fired()
        self._site.medium.write(key, spoiled)


def _damage(spoil: Spoil) -> Attach:
    def attach(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
        return _damaging(site, trigger, stream, spoil)

    return attach


def _misdirected(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    def spoil(key: ObjectKey, record: bytes, place: int) -> bytes:
        others = [other for other in site.known_keys() if other != key]
        found = site.medium.read(others[place % len(others)]) if others else None
        return record if found is None else found

    return _damaging(site, trigger, stream, spoil)


def _damaging(site: L2Site, trigger: Trigger, stream: RandomStream, spoil: Spoil) -> End:
    hook = _Damage(site, trigger, stream, spoil)
    hook.at_once()
    return hooked(site.backend.hooks, hook)


class _TearWrites(RecordHook):
    def __init__(self, site: L2Site, trigger: Trigger, stream: RandomStream) -> None:
        self._site = site
        self._trigger = trigger
        self._stream = stream

    def after(self, operation: str, key: ObjectKey) -> None:
        record = self._site.medium.read(key) if operation == "write" else None
        if record and self._trigger.hits():
            tear = damage.zero_tail if self._trigger.event.amount else damage.tear
            self._site.medium.write(key, tear(key, record, self._stream.getrandbits(_PLACE_BITS)))


def _torn_write(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.backend.hooks, _TearWrites(site, trigger, stream))


class _Wipe(RecordHook):
    """Empties the medium once: at once, or as soon as it holds a record."""

    def __init__(self, site: L2Site, trigger: Trigger) -> None:
        self._site = site
        self._trigger = trigger
        self._over = False

    def strike(self) -> None:
        if not self._over and any(self._site.medium.read(key) is not None for key in self._site.known_keys()):
            self._over = True
            self._trigger.fired()
            self._site.medium.wipe()

    def before(self, operation: str, key: ObjectKey) -> None:
        self.strike()


def _empty(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    hook = _Wipe(site, trigger)
    hook.strike()
    return hooked(site.backend.hooks, hook)


# ---- the kinds


def _at_a_moment(name: str, amount: tuple[int, int] = (0, 0)) -> Draw:
    """One event by time, which lasts until something is there to be struck."""

    def draw(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
        if not shape.adapters:
            return []
        at_ns = stream.random_ns(0, shape.horizon_ns * 3 // 4)
        return [FaultEvent(name, at_ns, 0, stream.pick(shape.adapters), amount=stream.randint(*amount))]

    return draw


def _damage_kind(name: str, about: str, attach: Attach) -> Kind:
    draw = either(_at_a_moment(name, (50, 1000)), by_count(name, nth=(1, 4)))
    return Kind(name, f"{about}; by time: `amount` of 1000 records", draw, everywhere(attach))


RECORD_KINDS = (
    Kind(
        "l2.full",
        "no room: every write ends with ENOSPC, half done where there are files",
        for_a_while("l2.full"),
        everywhere(_refusing(errno.ENOSPC, ("write",), ("write",))),
    ),
    Kind(
        "l2.read_only",
        "nothing can be written, renamed or removed",
        for_a_while("l2.read_only"),
        everywhere(_refusing(errno.EROFS, ("write", "delete"), ("write", "rename", "unlink", "mkdir"))),
    ),
    Kind(
        "l2.unlink_fails",
        "records cannot be removed; they keep their room",
        throughout("l2.unlink_fails"),
        everywhere(_refusing(errno.EIO, ("delete",), ("unlink",))),
    ),
    Kind(
        "l2.shortage",
        "our own process has no descriptor left; the records are well",
        either(for_a_while("l2.shortage"), by_count("l2.shortage")),
        everywhere(_refusing(errno.EMFILE, ("write", "read"), ("write", "read"))),
    ),
    Kind(
        "l2.torn_write",
        "the end of a record that was written is lost; with `amount` 1 its length is kept",
        either(for_a_while("l2.torn_write", (0, 1)), by_count("l2.torn_write", amount=(0, 1))),
        everywhere(_torn_write),
    ),
    _damage_kind("l2.bit_flip_header", "a bit of a record's header flips", _damage(damage.flip_header)),
    _damage_kind("l2.bit_flip_payload", "a bit of a record's payload flips", _damage(damage.flip_payload)),
    _damage_kind("l2.stale_format", "a record of an older format version comes back", _damage(damage.older_format)),
    _damage_kind(
        "l2.stale_record", "an older, shorter record of the same key comes back", _damage(damage.older_record)
    ),
    _damage_kind("l2.misdirected", "another key's record lies under a key's name", _misdirected),
    _damage_kind("l2.other_model", "the store gives back another model's records", _damage(damage.of_model)),
    _damage_kind("l2.other_tenant", "the store gives back another tenant's records", _damage(damage.of_salt)),
    Kind(
        "l2.empty",
        "the store comes back empty while its index still knows everything",
        _at_a_moment("l2.empty"),
        everywhere(_empty),
    ),
)
