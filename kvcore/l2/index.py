"""The index of an L2 adapter: what is there, how much, how old, who needs it. Pure and loop-confined.

States of one key
-----------------
    absent --admit--> WRITING                 bytes reserved, invisible to lookups
    WRITING --written--> PRESENT              reserved bytes become used bytes
    WRITING --not written--> absent           usage as before
    WRITING --nobody knows--> DOOMED          accounted, and deleted to be sure
    PRESENT --doom, idle--> DELETING          (idle: not locked, not being loaded)
    PRESENT --doom, busy--> DOOMED --last unlock or end of load--> DELETING
    PRESENT --chosen as victim--> DELETING    evicted for, or replaced by, the record of one writer
    DELETING --deleted--> absent
    DELETING --the store could not--> DOOMED  still occupies room: invisible, first choice as a victim

Only PRESENT is visible. One entry per key at any time, so one piece of work per key at any time.

Bytes
-----
`bytes_used` is what lies in the store: PRESENT, DOOMED and DELETING records, each with its envelope.
`bytes_reserved` is what running writes will need *beyond* the victims they delete first. A writer that
needs n bytes and deletes v reserves max(0, n - v); v - n of surplus is free only when the deletion is known to have
happened. So at every moment

    bytes in the store <= bytes_used + bytes_reserved <= capacity.

Admission of n bytes (capacity, then the tenant's quota) first asks two sums whether room can be made at all, which
costs O(1) also when a million objects are locked, and only then walks the victims: stuck DOOMED ones first, then
the least recently used ones that are idle. A lookup, a load and a repeated store count as use.

Rejected: deleting victims in work of their own (the directory would exceed its capacity between the two); counting
reservations as used (a failed put would move the usage); a lock count outside the entry (two truths).

Who holds: the adapter holds the index and every entry in it. Nobody else keeps an entry across calls, except the
adapter's own record of a running piece of work. An entry is freed when its state becomes absent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from functools import partial
from typing import Any, NamedTuple

from kvcore.keys import ObjectKey
from kvcore.quota import Quota


@unique
class State(Enum):
    WRITING = "writing"
    PRESENT = "present"
    DOOMED = "doomed"
    DELETING = "deleting"


# Asking the class for a member takes 0.1 us (Python 3.11), a dozen times per key.
WRITING, PRESENT, DOOMED, DELETING = State


@dataclass(slots=True, eq=False)
class Entry:
    key: ObjectKey
    payload_bytes: int
    record_bytes: int
    state: State
    locks: int = 0
    loads: int = 0
    broken: bool = False  # a read has shown a defect: loads are answered without another read
    doom_when_written: bool = False
    evicted: bool = False  # chosen as a victim while it was still good
    reserved_bytes: int = 0  # WRITING only
    deletions_failed: int = 0
    waiting: list[Any] | None = None  # the adapter's stores that wait for the running work; most entries never have one

    @property
    def idle(self) -> bool:
        return self.locks == 0 and self.loads == 0


class Admission(NamedTuple):
    """Room was made: the entry to write, and the victims that must be deleted before."""

    entry: Entry
    victims: tuple[Entry, ...]


# tuple.__new__ runs without a Python frame per key
_make_admission: Callable[[tuple[Entry, tuple[Entry, ...]]], Admission] = partial(tuple.__new__, Admission)


class _Recency:
    """Entries that are idle, least recently used first, as a whole and per tenant."""

    def __init__(self, per_salt: bool) -> None:
        self.bytes = 0
        self._per_salt = per_salt
        self._entries: OrderedDict[ObjectKey, Entry] = OrderedDict()
        self._of_salt: dict[str, OrderedDict[ObjectKey, Entry]] = {}
        self._bytes_of_salt: dict[str, int] = {}

    def __contains__(self, entry: Entry) -> bool:
        return self._entries.get(entry.key) is entry

    def add(self, entry: Entry, *, newest: bool) -> None:
        key = entry.key
        assert key not in self._entries
        self.bytes += entry.record_bytes
        self._entries[key] = entry  # as the newest one
        if not newest:
            self._entries.move_to_end(key, last=False)
        if self._per_salt:
            self._add_to_salt(entry, newest)

    def remove(self, entry: Entry) -> None:
        key = entry.key
        if self._entries.get(key) is not entry:
            return
        self.bytes -= entry.record_bytes
        assert self.bytes >= 0
        del self._entries[key]
        if self._per_salt:
            self._remove_from_salt(entry)

    def oldest(self, salt: str | None = None) -> Entry | None:
        entries = self._entries if salt is None else self._of_salt.get(salt)
        return next(iter(entries.values()), None) if entries else None

    def bytes_of(self, salt: str) -> int:
        return self._bytes_of_salt.get(salt, 0)

    def _add_to_salt(self, entry: Entry, newest: bool) -> None:
        salt = entry.key.cache_salt
        entries = self._of_salt.setdefault(salt, OrderedDict())
        entries[entry.key] = entry
        if not newest:
            entries.move_to_end(entry.key, last=False)
        _add(self._bytes_of_salt, salt, entry.record_bytes)

    def _remove_from_salt(self, entry: Entry) -> None:
        salt = entry.key.cache_salt
        entries = self._of_salt[salt]
        del entries[entry.key]
        if not entries:
            del self._of_salt[salt]
        _add(self._bytes_of_salt, salt, -entry.record_bytes)


class Index:
    """See the module text."""

    def __init__(self, capacity_bytes: int | None, limits: Quota | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_used = 0
        self.bytes_reserved = 0
        self.objects = 0  # PRESENT entries
        self.locked = 0  # entries with at least one lock
        self._bytes_leaving = 0  # DELETING entries: still part of bytes_used
        self._limits = limits
        self._entries: dict[ObjectKey, Entry] = {}
        self._recency = _Recency(limits is not None)
        self._bytes_of_salt: dict[str, int] = {}  # WRITING, PRESENT and DOOMED; only with limits

    def get(self, key: ObjectKey) -> Entry | None:
        return self._entries.get(key)

    def visible(self, key: ObjectKey) -> Entry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.state is PRESENT else None

    def keys(self) -> list[ObjectKey]:
        return [key for key, entry in self._entries.items() if entry.state is PRESENT]

    # --- use ---------------------------------------------------------------------------------------------------

    def lock(self, entry: Entry) -> None:
        assert entry.state is PRESENT
        self._recency.remove(entry)
        self.locked += entry.locks == 0
        entry.locks += 1

    def unlock(self, entry: Entry) -> bool:
        """Give back one lock. True: the entry is doomed and idle, its deletion may begin."""
        assert entry.locks > 0
        entry.locks -= 1
        self.locked -= entry.locks == 0
        return self._settle(entry)

    def begin_load(self, entry: Entry) -> None:
        assert entry.state is PRESENT or entry.state is DOOMED
        self._recency.remove(entry)
        entry.loads += 1

    def end_load(self, entry: Entry) -> bool:
        """Like `unlock`."""
        assert entry.loads > 0
        entry.loads -= 1
        return self._settle(entry)

    def touch(self, entry: Entry) -> None:
        """A use that takes no lock."""
        assert entry.state is PRESENT
        self._recency.remove(entry)
        self._settle(entry)

    # --- writing -----------------------------------------------------------------------------------------------

    def admit(self, key: ObjectKey, payload_bytes: int, record_bytes: int) -> Admission | None:
        """Reserve room for one record, replacing an idle one of the same key. None: no room can be made."""
        old = self._entries.get(key)
        victims: tuple[Entry, ...] = ()
        freed_bytes = 0
        if old is not None or self._limits is not None or self._over_bytes(record_bytes) > 0:
            assert old is None or old in self._recency
            if not self._can_fit(key.cache_salt, record_bytes):
                return None
            victims = tuple(self._evict_for(key.cache_salt, record_bytes, old))
            freed_bytes = sum(victim.record_bytes for victim in victims)
        entry = Entry(key, payload_bytes, record_bytes, WRITING)
        entry.reserved_bytes = max(0, record_bytes - freed_bytes)
        self.bytes_reserved += entry.reserved_bytes
        self._entries[key] = entry
        if self._limits is not None:
            self._count_salt(entry, record_bytes)
        self.check_room()
        return _make_admission((entry, victims))

    def written(self, entry: Entry) -> bool:
        """The record is there, its victims are `deleted`. True: a deletion was asked for meanwhile and may begin."""
        assert entry.reserved_bytes == entry.record_bytes
        assert entry.idle, "nobody has seen it yet"
        self._end_reservation(entry)
        self.bytes_used += entry.record_bytes
        entry.state = PRESENT
        self.objects += 1
        self.check_room()
        self._recency.add(entry, newest=True)
        return entry.doom_when_written and self.doom(entry)

    def not_written(self, entry: Entry) -> None:
        self._end_reservation(entry)
        self._count_salt(entry, -entry.record_bytes)
        del self._entries[entry.key]

    def perhaps_written(self, entry: Entry, victims: Sequence[Entry]) -> list[Entry]:
        """The outcome is unknown, that of the deletion of `victims` too: what must be deleted to be sure again.

        Everything that may lie in the store stays accounted: the victims as they were, and for the record the
        bytes reserved for it, under a doomed entry of its key (the replaced one, if it is among the victims).
        """
        reserved_bytes = entry.reserved_bytes
        self.not_written(entry)
        for victim in victims:
            self.not_deleted(victim)
        heir = self._entries.get(entry.key) or Entry(entry.key, entry.payload_bytes, 0, DOOMED)
        assert heir.state is DOOMED
        self._entries[entry.key] = heir
        self._recency.remove(heir)
        heir.record_bytes += reserved_bytes
        self.bytes_used += reserved_bytes
        self._count_salt(heir, reserved_bytes)
        self._settle(heir)
        self.check_room()
        return [heir, *(victim for victim in victims if victim is not heir)]

    def adopt(self, key: ObjectKey, payload_bytes: int, record_bytes: int) -> None:
        """A record that the scan at start has found. May exceed the capacity until `surplus` is deleted."""
        assert key not in self._entries
        entry = Entry(key, payload_bytes, record_bytes, PRESENT)
        self._entries[key] = entry
        self.bytes_used += record_bytes
        self.objects += 1
        self._count_salt(entry, record_bytes)
        self._settle(entry)

    # --- removing ----------------------------------------------------------------------------------------------

    def doom(self, entry: Entry) -> bool:
        """Make the record invisible. True: it is idle and its deletion may begin (`begin_delete`)."""
        assert entry.state in (PRESENT, DOOMED)
        self._recency.remove(entry)
        self.objects -= entry.state is PRESENT
        entry.state = DOOMED
        return self._settle(entry)

    def begin_delete(self, entry: Entry) -> None:
        assert entry in self._recency, "only an idle entry may go"
        self._recency.remove(entry)
        self.objects -= entry.state is PRESENT
        entry.state = DELETING
        self._bytes_leaving += entry.record_bytes
        self._count_salt(entry, -entry.record_bytes)

    def deleted(self, entry: Entry, successor: Entry | None = None) -> None:
        """The record is gone. Its room goes to the writer that it made room for, as far as that needs it."""
        self._end_delete(entry)
        self.bytes_used -= entry.record_bytes
        assert self.bytes_used >= 0
        if successor is not None:
            self._reserve_more(successor, entry.record_bytes)
        if self._entries.get(entry.key) is entry:  # otherwise its successor is being written
            del self._entries[entry.key]

    def not_deleted(self, entry: Entry) -> None:
        """The record is still there: invisible, and tried again when its room or its key is wanted.

        When its successor was to be written, the successor's `not_written` comes first.
        """
        self._end_delete(entry)
        assert self._entries.get(entry.key) in (None, entry)
        self._entries[entry.key] = entry
        entry.state = DOOMED
        self._count_salt(entry, entry.record_bytes)
        self._settle(entry)

    def surplus(self) -> list[Entry]:
        """Begin the deletion of what a start has found beyond the quotas and the capacity."""
        victims: list[Entry] = []
        for salt in list(self._bytes_of_salt):
            while self._over_quota_bytes(salt, 0) > 0:
                victims.append(self._evict_oldest(salt))
        while self._over_bytes(0) > self._bytes_leaving:
            victims.append(self._evict_oldest(None))
        return victims

    # --- checks ------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        if self.capacity_bytes is not None:
            assert self.bytes_used + self.bytes_reserved <= self.capacity_bytes
        assert self.bytes_reserved >= 0
        assert self._bytes_leaving <= self.bytes_used

    def check(self) -> None:
        """Walk everything (tests and oracles)."""
        entries = list(self._entries.values())
        settled = [entry for entry in entries if entry.state in (PRESENT, DOOMED)]
        assert self.objects == sum(entry.state is PRESENT for entry in entries)
        assert self.locked == sum(entry.locks > 0 for entry in entries)
        assert sum(entry.record_bytes for entry in settled) == self.bytes_used - self._bytes_leaving
        assert self._recency.bytes == sum(entry.record_bytes for entry in settled if entry.idle)
        assert all((entry in self._recency) == entry.idle for entry in settled)
        assert all(not entry.waiting for entry in settled)
        self.check_room()

    # --- inside ------------------------------------------------------------------------------------------------

    def _settle(self, entry: Entry) -> bool:
        """Put an entry that has become idle where victims are found. True: it is doomed."""
        doomed = entry.state is DOOMED
        assert doomed or entry.state is PRESENT
        if entry.locks or entry.loads:
            return False
        self._recency.add(entry, newest=not doomed)
        return doomed

    def _can_fit(self, salt: str, bytes_wanted: int) -> bool:
        if self._over_bytes(bytes_wanted) > self._recency.bytes:
            return False
        return self._over_quota_bytes(salt, bytes_wanted) <= self._recency.bytes_of(salt)

    def _evict_for(self, salt: str, bytes_wanted: int, old: Entry | None) -> list[Entry]:
        """Choose victims and begin their deletion; `_can_fit` has said that there are enough."""
        victims: list[Entry] = []
        over_bytes = self._over_bytes(bytes_wanted)
        if old is not None:
            self.begin_delete(old)
            victims.append(old)
        while self._over_quota_bytes(salt, bytes_wanted) > 0:
            victims.append(self._evict_oldest(salt))
        over_bytes -= sum(victim.record_bytes for victim in victims)
        while over_bytes > 0:
            victims.append(self._evict_oldest(None))
            over_bytes -= victims[-1].record_bytes
        return victims

    def _evict_oldest(self, salt: str | None) -> Entry:
        victim = self._recency.oldest(salt)
        assert victim is not None, "the sums say there is one"
        victim.evicted = victim.state is PRESENT
        self.begin_delete(victim)
        return victim

    def _over_bytes(self, bytes_wanted: int) -> int:
        """How much must go before `bytes_wanted` more fit. Running deletions count as not done."""
        if self.capacity_bytes is None:
            return 0
        return self.bytes_used + self.bytes_reserved + bytes_wanted - self.capacity_bytes

    def _over_quota_bytes(self, salt: str, bytes_wanted: int) -> int:
        limit = None if self._limits is None else self._limits.limit_of(salt)
        return 0 if limit is None else self._bytes_of_salt.get(salt, 0) + bytes_wanted - limit

    def _end_reservation(self, entry: Entry) -> None:
        assert entry.state is WRITING
        assert self._entries[entry.key] is entry
        self.bytes_reserved -= entry.reserved_bytes
        entry.reserved_bytes = 0

    def _reserve_more(self, entry: Entry, bytes_freed: int) -> None:
        assert entry.state is WRITING
        more_bytes = min(entry.record_bytes - entry.reserved_bytes, bytes_freed)
        self.bytes_reserved += more_bytes
        entry.reserved_bytes += more_bytes

    def _end_delete(self, entry: Entry) -> None:
        assert entry.state is DELETING
        self._bytes_leaving -= entry.record_bytes
        assert self._bytes_leaving >= 0

    def _count_salt(self, entry: Entry, change_bytes: int) -> None:
        if self._limits is not None:
            _add(self._bytes_of_salt, entry.key.cache_salt, change_bytes)


def _add(totals: dict[str, int], name: str, change: int) -> None:
    """Add to a total and forget totals of zero, so that tenants that have left cost nothing."""
    total = totals.get(name, 0) + change
    assert total >= 0
    if total:
        totals[name] = total
    else:
        totals.pop(name, None)
