"""Room for objects: the arena, the eviction order and the quotas together.

`obtain` looks for room in a fixed order: free memory; then victims, by bytes, until the request fits or nothing
unprotected is left. With quotas each key is admitted first: a tenant that would be over its limit evicts objects of its
own, and only those, whatever else is in the cache.

An object longer than the arena (or than its tenant's whole quota) is refused without evicting anything. When a request
could fit by bytes but not by address, eviction goes on in steps of the bytes still missing; it may end with NO_SPACE
and an emptier cache, which only happens to requests much larger than the usual objects.

Who holds, announces, frees: slots obtained belong to the caller, who gives each back once. Victims are announced to L1
through `evicted`, which gives them back before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from kvcore.eviction import EvictionPolicy, PolicyFactory, TenantOrder
from kvcore.keys import ObjectKey
from kvcore.memory import Arena, Slot
from kvcore.quota import Quota, QuotaLedger


class Room:
    """See the module text. `order` holds what may be evicted; L1 keeps it up to date."""

    def __init__(
        self, arena: Arena, policy_factory: PolicyFactory, quota: Quota | None, evicted: Callable[[list[Slot]], None]
    ) -> None:
        self._arena = arena
        self._tenants = None if quota is None else TenantOrder(policy_factory)
        self._ledger = None if quota is None else QuotaLedger(quota)
        self.order: EvictionPolicy = policy_factory() if self._tenants is None else self._tenants
        self._evicted = evicted

    @property
    def bytes_used(self) -> int:
        return self._arena.capacity_bytes - self._arena.bytes_free

    def obtain(self, wanted: Mapping[ObjectKey, int], sizes: int | Sequence[int]) -> list[Slot | None]:
        """A slot for each key that finds room, None for the others. `wanted` maps a key to its place in `sizes`."""
        if isinstance(sizes, int) and self._ledger is None:
            return self._obtain(sizes, list(wanted))
        slots: list[Slot | None] = []
        for size, keys in _runs(wanted, sizes):
            if self._ledger is None:
                slots += self._obtain(size, keys)
            else:
                slots += [self._obtain_charged(size, key, self._ledger) for key in keys]
        return slots

    def evict(self, bytes_wanted: int) -> int:
        """Evict in the order of the policy until `bytes_wanted` are freed or nothing is left; bytes freed."""
        return self._evict(bytes_wanted, self.order.victim)

    def give_back(self, slots: list[Slot]) -> None:
        """Free memory that nobody reads, writes or copies any more."""
        self._arena.free_batch(slots)
        if self._ledger is None or self._tenants is None:
            return
        for slot in slots:
            salt = slot.key.cache_salt
            self._ledger.credit(salt, slot.extent)
            if not self._ledger.bytes_used(salt):
                self._tenants.forget(salt)

    def check(self) -> None:
        self._arena.check()
        assert self._ledger is None or self._ledger.bytes_total == self.bytes_used

    def _obtain(self, size: int, keys: list[ObjectKey]) -> list[Slot | None]:
        arena = self._arena
        slots: list[Slot | None] = [*arena.allocate_batch(size, keys)]
        if len(slots) == len(keys):
            return slots
        extent = arena.extent(size)
        while len(slots) < len(keys) and extent <= arena.capacity_bytes:
            missing = keys[len(slots) :]
            if not self.evict(extent * len(missing)):
                break
            slots += arena.allocate_batch(size, missing)
        slots += [None] * (len(keys) - len(slots))
        return slots

    def _obtain_charged(self, size: int, key: ObjectKey, ledger: QuotaLedger) -> Slot | None:
        extent = self._arena.extent(size)
        if not self._admit(key.cache_salt, extent, ledger):
            return None
        slot = self._obtain(size, [key])[0]
        if slot is not None:
            ledger.charge(key.cache_salt, extent)
        return slot

    def _admit(self, salt: str, extent: int, ledger: QuotaLedger) -> bool:
        """Whether the tenant may have `extent` bytes more, after evicting objects of its own if need be."""
        tenants = self._tenants
        assert tenants is not None
        if extent > self._arena.capacity_bytes or not ledger.can_ever_hold(salt, extent):
            return False
        excess = ledger.excess(salt, extent)
        if excess:
            self._evict(excess, lambda: tenants.victim_of(salt))
        return not ledger.excess(salt, extent)

    def _evict(self, bytes_wanted: int, victim: Callable[[], Slot | None]) -> int:
        slots: list[Slot] = []
        freed = 0
        while freed < bytes_wanted and (slot := victim()) is not None:
            assert not slot.readers, "a reader's object was chosen as victim"
            assert not slot.holds, "a victim is still being copied"
            slots.append(slot)
            freed += slot.extent
        if slots:
            self._evicted(slots)
        return freed


def _runs(wanted: Mapping[ObjectKey, int], sizes: int | Sequence[int]) -> Iterator[tuple[int, list[ObjectKey]]]:
    """The wanted keys in order, cut into runs of equal size."""
    if isinstance(sizes, int):
        yield sizes, list(wanted)
        return
    for size, run in groupby(wanted.items(), key=lambda item: sizes[item[1]]):
        yield size, [key for key, _ in run]
