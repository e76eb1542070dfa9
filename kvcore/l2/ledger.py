"""The ledger of a shared store: what we believe lies there, how much, whose, and how old. Pure and loop-confined.

In a shared store the store is the truth, so the ledger is a belief, good enough for three things: usage figures, the
list of keys, and the choice of what to evict beyond a capacity or a tenant's quota. A wrong entry costs a needless
deletion of nothing, a missing one some room until the next scan; neither can make a wrong answer.

How it learns: from our own writes and deletions, from lookups and loads that found something or did not, and from scans
(at the start, and again after `rescan_bytes` of own writes, since other processes write too). A scan is merged page by
page; what it has not seen when it is complete, and nobody has touched since it began, is forgotten.

Bytes:  `bytes_used` of entries, `bytes_reserved` of our running writes, `bytes_leaving` of entries being evicted.
Admission of n bytes evicts, oldest first, until used + reserved - leaving + n <= capacity, or answers None (FULL). With
several processes each keeps to this by its own belief: the store may hold up to `rescan_bytes` more per other process.

Age is the time of the last use by this process, or what the scan could tell. The order is a heap of (time, key) whose
items may be out of date: an item older than its entry's last use is put back with the new time when it comes up. A key
that is in use when it comes up is *parked* outside the heap, and comes back when its use ends (`unpark`), so that
a million locked keys are not walked at each admission.

Rejected: a sorted list (a million insertions in a row on the loop); evicting by what the store calls old alone (its
clock knows nothing of our locks); counting reservations as used (a failed put would move the usage).

Who holds: the adapter holds the ledger; an entry is freed by `forget`. Nothing here does I/O or knows what time it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvcore.keys import ObjectKey
from kvcore.quota import Quota

KEYS_MAX = 1_000_000
"""More keys are not remembered one by one (about 300 bytes each): they are neither listed nor evicted by us."""

_ITEMS_MIN = 1024
_VICTIMS_MAX = 256  # for one record; a larger surplus is for `surplus`, and FULL until then


@dataclass(slots=True, eq=False)
class Record:
    """One key that we believe is there."""

    key: ObjectKey
    record_bytes: int
    used_ns: int
    scan: int  # the scan that has seen it, or during which it was touched
    leaving: bool = False
    parked: bool = False


class Room(NamedTuple):
    """Room was made for one record. `reserved_bytes` are given back with `settle`."""

    victims: Sequence[ObjectKey]
    reserved_bytes: int


class _Ages:
    """Oldest first, with items that may be out of date (see the module text), but never more than half of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Record]] = []
        self._ties = count()
        self._items_max = _ITEMS_MIN

    def push(self, record: Record, wanted: Callable[[Record], bool]) -> None:
        if len(self._heap) >= self._items_max:
            self._compact(wanted)
        heapq.heappush(self._heap, (record.used_ns, next(self._ties), record))

    def pop(self, wanted: Callable[[Record], bool]) -> Record | None:
        """The oldest record that is `wanted`; those that are not are dropped from this heap."""
        while self._heap:
            used_ns, _, record = heapq.heappop(self._heap)
            if not wanted(record):
                continue
            if used_ns == record.used_ns:
                return record
            heapq.heappush(self._heap, (record.used_ns, next(self._ties), record))
        return None

    def _compact(self, wanted: Callable[[Record], bool]) -> None:
        records = {item[2].key: item[2] for item in self._heap if wanted(item[2])}
        self._heap = [(record.used_ns, next(self._ties), record) for record in records.values()]
        heapq.heapify(self._heap)
        self._items_max = max(_ITEMS_MIN, 2 * len(self._heap))


class Ledger:
    """See the module text. `in_use(key)`: this process has locked it, loads it, writes it or removes it."""

    def __init__(
        self,
        in_use: Callable[[ObjectKey], bool],
        capacity_bytes: int | None = None,
        quota: Quota | None = None,
        rescan_bytes: int | None = None,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_used = 0
        self.bytes_reserved = 0
        self.bytes_leaving = 0
        self._in_use = in_use
        self._quota = quota
        self._rescan_bytes = rescan_bytes
        self._keys_max = keys_max
        self._unlimited = capacity_bytes is None and quota is None  # nothing is ever evicted, so nothing is parked
        self._records: dict[ObjectKey, Record] = {}
        self._of_salt: dict[str, int] = {}  # used + reserved - leaving; only with a quota
        self._ages = _Ages()
        self._ages_of_salt: dict[str, _Ages] = {}  # only with a quota
        self._scan = 0
        self._scanning = False
        self._forgotten: set[ObjectKey] = set()  # while a scan runs: it may have seen them before
        self._written_bytes = 0  # since the last scan began

    # --- what is there -----------------------------------------------------------------------------------------

    @property
    def objects(self) -> int:
        return len(self._records)

    def keys(self) -> list[ObjectKey]:
        return list(self._records)

    def bytes_of(self, key: ObjectKey) -> int | None:
        record = self._records.get(key)
        return None if record is None else record.record_bytes

    def note(self, key: ObjectKey, record_bytes: int, now_ns: int) -> None:
        """It is there: we have written or loaded it."""
        self._forgotten.discard(key)
        self._put(key, record_bytes, now_ns)

    def touch(self, key: ObjectKey, now_ns: int) -> None:
        """A lookup has found it. (One that we do not know stays unknown: its length is.)"""
        record = self._records.get(key)
        if record is not None:
            record.used_ns = max(record.used_ns, now_ns)
            record.scan = self._scan

    def forget(self, key: ObjectKey) -> None:
        """It is not there, or not any more."""
        if self._scanning:
            self._forgotten.add(key)
        record = self._records.pop(key, None)
        if record is None:
            return
        if record.leaving:
            self._stay(record)
        self._count(record, -record.record_bytes)

    # --- room --------------------------------------------------------------------------------------------------

    def admit(self, key: ObjectKey, record_bytes: int) -> Room | None:
        """Reserve room for a record, and say what must be evicted for it. None: no room can be made."""
        more_bytes = max(0, record_bytes - (self.bytes_of(key) or 0))
        victims = self._victims(key.cache_salt, more_bytes)
        if victims is None:
            return None
        self._reserve(key, more_bytes)
        return Room(victims, more_bytes)

    def settle(self, key: ObjectKey, reserved_bytes: int) -> None:
        """The write that was admitted has ended; `note` follows if the record is there now."""
        self._reserve(key, -reserved_bytes)
        self._written_bytes += reserved_bytes

    def kept(self, key: ObjectKey) -> None:
        """A victim could not be evicted."""
        record = self._records.get(key)
        if record is not None and record.leaving:
            self._stay(record)
            self._offer(record)

    def surplus(self, limit: int) -> list[ObjectKey]:
        """Up to `limit` keys that are beyond capacity or quota (after a scan): to be evicted."""
        victims: list[ObjectKey] = []
        for salt in list(self._of_salt):
            while len(victims) < limit and self._over_quota_bytes(salt, 0) > 0 and self._evict(salt, victims):
                pass
        while len(victims) < limit and self._over_bytes(0) > 0 and self._evict(None, victims):
            pass
        return victims

    def unpark(self, key: ObjectKey) -> None:
        """Its use has ended."""
        if self._unlimited:
            return
        record = self._records.get(key)
        if record is not None and record.parked:
            record.parked = False
            self._offer(record)

    # --- scans -------------------------------------------------------------------------------------------------

    @property
    def wants_scan(self) -> bool:
        return self._rescan_bytes is not None and not self._scanning and self._written_bytes >= self._rescan_bytes

    def begin_scan(self) -> None:
        assert not self._scanning
        self._scan += 1
        self._scanning = True
        self._written_bytes = 0

    def seen(self, key: ObjectKey, record_bytes: int, used_ns: int) -> None:
        assert self._scanning
        if key not in self._forgotten:
            self._put(key, record_bytes, used_ns)

    def end_scan(self, complete: bool) -> None:
        """`complete`: what was not seen is gone. Otherwise (an error) the scan has only added."""
        self._scanning = False
        self._forgotten.clear()
        if complete:
            for key in [key for key, record in self._records.items() if record.scan < self._scan]:
                if not self._in_use(key):
                    self.forget(key)

    def check(self) -> None:
        """Assert the sums by a full walk (tests)."""
        records = self._records.values()
        assert self.bytes_used == sum(record.record_bytes for record in records)
        assert self.bytes_leaving == sum(record.record_bytes for record in records if record.leaving)
        charged_bytes = 0 if self._quota is None else self.bytes_used + self.bytes_reserved - self.bytes_leaving
        assert sum(self._of_salt.values()) == charged_bytes
        assert all(total > 0 for total in self._of_salt.values())

    # --- inside ------------------------------------------------------------------------------------------------

    def _put(self, key: ObjectKey, record_bytes: int, used_ns: int) -> None:
        record = self._records.get(key)
        if record is None:
            if len(self._records) >= self._keys_max:
                return
            record = self._records[key] = Record(key, 0, used_ns, self._scan)
            self._offer(record)
        if record.leaving:
            self._stay(record)
            self._offer(record)
        self._count(record, record_bytes - record.record_bytes)
        record.record_bytes = record_bytes
        record.used_ns = max(record.used_ns, used_ns)
        record.scan = self._scan

    def _victims(self, salt: str, more_bytes: int) -> Sequence[ObjectKey] | None:
        if self._unlimited:
            return ()
        victims: list[ObjectKey] = []
        while self._over_quota_bytes(salt, more_bytes) > 0 and self._evict(salt, victims):
            pass
        while self._over_bytes(more_bytes) > 0 and self._evict(None, victims):
            pass
        if self._over_bytes(more_bytes) <= 0 and self._over_quota_bytes(salt, more_bytes) <= 0:
            return victims
        for key in victims:
            self.kept(key)
        return None

    def _evict(self, salt: str | None, victims: list[ObjectKey]) -> bool:
        ages = self._ages if salt is None else self._ages_of_salt.get(salt)
        record = None if ages is None or len(victims) == _VICTIMS_MAX else ages.pop(self._evictable)
        if record is None:
            return False
        record.leaving = True
        self.bytes_leaving += record.record_bytes
        self._count_salt(record.key.cache_salt, -record.record_bytes)
        victims.append(record.key)
        return True

    def _current(self, record: Record) -> bool:
        return not record.leaving and not record.parked and self._records.get(record.key) is record

    def _evictable(self, record: Record) -> bool:
        if not self._current(record):
            return False
        record.parked = self._in_use(record.key)
        return not record.parked

    def _offer(self, record: Record) -> None:
        salt = record.key.cache_salt
        if self.capacity_bytes is not None:
            self._ages.push(record, self._current)
        if self._quota is not None and self._quota.limit_of(salt) is not None:
            self._ages_of_salt.setdefault(salt, _Ages()).push(record, self._current)

    def _stay(self, record: Record) -> None:
        record.leaving = False
        self.bytes_leaving -= record.record_bytes
        assert self.bytes_leaving >= 0
        self._count_salt(record.key.cache_salt, record.record_bytes)

    def _over_bytes(self, more_bytes: int) -> int:
        if self.capacity_bytes is None:
            return 0
        return self.bytes_used + self.bytes_reserved - self.bytes_leaving + more_bytes - self.capacity_bytes

    def _over_quota_bytes(self, salt: str, more_bytes: int) -> int:
        limit = None if self._quota is None else self._quota.limit_of(salt)
        return 0 if limit is None else self._of_salt.get(salt, 0) + more_bytes - limit

    def _reserve(self, key: ObjectKey, change_bytes: int) -> None:
        self.bytes_reserved += change_bytes
        assert self.bytes_reserved >= 0
        self._count_salt(key.cache_salt, change_bytes)

    def _count(self, record: Record, change_bytes: int) -> None:
        if change_bytes == 0:  # used once more, as most are
            return
        self.bytes_used += change_bytes
        assert self.bytes_used >= 0
        self._count_salt(record.key.cache_salt, change_bytes)

    def _count_salt(self, salt: str, change_bytes: int) -> None:
        if self._quota is None:
            return
        total = self._of_salt.get(salt, 0) + change_bytes
        assert total >= 0
        if total:
            self._of_salt[salt] = total
        else:
            self._of_salt.pop(salt, None)
