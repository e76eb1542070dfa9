"""Which unprotected object goes first.

Theory of operation
-------------------
L1 tells a policy, in batches, what happens to objects that may be evicted:

    add(slots)      became evictable: published without a reader, or the last lease or hold has ended
    pin(slots)      were evictable and are protected from now on
    remove(slots)   are gone, evictable or not
    renew(slots)    were evictable, still are, and a request that used them has ended
    victim()        takes the next one out of the order and returns it; None: nothing is evictable

A refusal must not walk a million pinned objects. Two ways keep it cheap, and each fits its policy:

* `LruPolicy` takes a pinned object *out* of the order; it comes back at the young end when it is unpinned, which is
  what LRU wants anyway. Every step of `victim` yields a victim.
* `S3FifoPolicy` must keep the place of an object in its queue, so a pinned object stays. When `victim` meets one it is
  *parked* outside the queues until it is unpinned; each pin is paid for at most once.

Order inside a batch is the order given. L1 gives a prefix chain back last chunk first, so that its beginning, without
which the rest serves nothing, stays longest. A prompt that is computed in several steps is published in several
batches, beginning first, and what the engine has in its own memory is never read from here; so the end of a request
renews its chain. `LruPolicy` makes that its order; `S3FifoPolicy` keeps places, whatever is read.

S3-FIFO (Yang et al., SOSP 2023), by bytes: new objects enter *small* (a tenth of the bytes), the rest is *main*, and
*ghost* remembers the keys of objects that left from small. `victim`:

1. While small holds more than its share (or main is empty): its oldest object goes to main if it was read more than
   once, else it is the victim and its key enters ghost.
2. Otherwise main's oldest object goes back to main's young end with one read less, or is the victim if none is left.
3. An object whose key is in ghost enters main at once.

Reads are counted up to 3; so an object takes at most four steps per read or insertion, and `victim` is O(1) amortised.
`steps` counts the objects looked at, for the tests that hold us to it.

With quotas a tenant evicts only its own objects, so `TenantOrder` keeps one policy over everything and one per tenant.
Rejected: one policy per tenant only (whom to take from when the arena is full and nobody is over its limit needs a
global order anyway).

Who holds, announces, frees: a policy holds references to slots, never their memory. L1 announces, L1 frees.
No decision depends on hash or address order: all containers are ordered by insertion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvcore.memory import Slot

READS_MAX = 3
SMALL_SHARE = 10  # small holds one part in ten of the bytes


class EvictionPolicy(Protocol):
    """See the module text. `steps` counts the objects that `victim` has looked at."""

    @property
    def steps(self) -> int: ...

    def __len__(self) -> int:
        """Objects in the order, those that are parked not counted."""
        ...

    def add(self, slots: Sequence[Slot]) -> None: ...
    def pin(self, slots: Sequence[Slot]) -> None: ...
    def remove(self, slots: Sequence[Slot]) -> None: ...
    def renew(self, slots: Sequence[Slot]) -> None: ...
    def victim(self) -> Slot | None: ...


PolicyFactory = Callable[[], EvictionPolicy]


class LruPolicy:
    """Least recently released first."""

    def __init__(self) -> None:
        # A plain dict would do, but finding its first entry after many deletions at the front is O(n).
        self._order: OrderedDict[Slot, None] = OrderedDict()
        self.steps = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, slots: Sequence[Slot]) -> None:
        order = self._order
        for slot in slots:
            order[slot] = None

    def pin(self, slots: Sequence[Slot]) -> None:
        order = self._order
        for slot in slots:
            del order[slot]

    def remove(self, slots: Sequence[Slot]) -> None:
        pop = self._order.pop
        for slot in slots:
            pop(slot, None)

    def renew(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._order.move_to_end(slot)

    def victim(self) -> Slot | None:
        if not self._order:
            return None
        self.steps += 1
        return self._order.popitem(last=False)[0]


class _Queue:
    """A FIFO of slots with their read counts and the sum of their bytes."""

    __slots__ = ("bytes", "reads")

    def __init__(self) -> None:
        self.reads: OrderedDict[Slot, int] = OrderedDict()
        self.bytes = 0

    def push(self, slot: Slot, reads: int) -> None:
        assert slot not in self.reads
        self.reads[slot] = reads
        self.bytes += slot.extent

    def pop_oldest(self) -> tuple[Slot, int]:
        slot, reads = self.reads.popitem(last=False)
        self.bytes -= slot.extent
        return slot, reads

    def discard(self, slot: Slot) -> None:
        if self.reads.pop(slot, None) is not None:
            self.bytes -= slot.extent


class S3FifoPolicy:
    """Three FIFO queues: resists scans and needs no move on a read."""

    def __init__(self) -> None:
        self._small = _Queue()
        self._main = _Queue()
        self._parked: dict[Slot, tuple[_Queue, int]] = {}
        self._ghost: OrderedDict[Any, None] = OrderedDict()
        self.steps = 0

    def __len__(self) -> int:
        return len(self._small.reads) + len(self._main.reads)

    def add(self, slots: Sequence[Slot]) -> None:
        small = self._small.reads
        main = self._main.reads
        for slot in slots:
            if slot in small or slot in main:
                continue  # it kept its place while it was pinned
            home = self._parked.pop(slot, None)
            if home is not None:
                home[0].push(slot, home[1])
            elif slot.key in self._ghost:
                del self._ghost[slot.key]
                self._main.push(slot, 0)
            else:
                self._small.push(slot, 0)

    def pin(self, slots: Sequence[Slot]) -> None:
        """A pin is a read (or the copy of one)."""
        small = self._small.reads
        main = self._main.reads
        for slot in slots:
            reads = small if slot in small else main
            if reads[slot] < READS_MAX:
                reads[slot] += 1

    def remove(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._small.discard(slot)
            self._main.discard(slot)
            self._parked.pop(slot, None)

    def renew(self, slots: Sequence[Slot]) -> None:
        """A queue is a queue."""

    def victim(self) -> Slot | None:
        small, main = self._small, self._main
        while small.reads or main.reads:
            self.steps += 1
            crowded = small.bytes * SMALL_SHARE > small.bytes + main.bytes
            queue = small if small.reads and (crowded or not main.reads) else main
            slot, reads = queue.pop_oldest()
            if slot.readers or slot.holds:
                self._parked[slot] = (queue, reads)
            elif queue is small and reads > 1:
                main.push(slot, 0)
            elif queue is main and reads:
                main.push(slot, reads - 1)
            else:
                if queue is small:
                    self._remember(slot.key)
                return slot
        assert not small.bytes, "an empty queue has no bytes"
        assert not main.bytes, "an empty queue has no bytes"
        return None

    def _remember(self, key: Any) -> None:
        """Ghost holds as many keys as the queues hold objects (at least one)."""
        self._ghost[key] = None
        while len(self._ghost) > max(1, len(self)):
            self._ghost.popitem(last=False)


class TenantOrder:
    """One order over everything and one per tenant (the salt of the slot's key)."""

    def __init__(self, factory: PolicyFactory) -> None:
        self._factory = factory
        self._all = factory()
        self._by_tenant: dict[str, EvictionPolicy] = {}

    @property
    def steps(self) -> int:
        return self._all.steps + sum(policy.steps for policy in self._by_tenant.values())

    def __len__(self) -> int:
        return len(self._all)

    def add(self, slots: Sequence[Slot]) -> None:
        self._all.add(slots)
        for slot in slots:
            self._of(slot).add((slot,))

    def pin(self, slots: Sequence[Slot]) -> None:
        self._all.pin(slots)
        for slot in slots:
            self._of(slot).pin((slot,))

    def remove(self, slots: Sequence[Slot]) -> None:
        self._all.remove(slots)
        for slot in slots:
            self._of(slot).remove((slot,))

    def renew(self, slots: Sequence[Slot]) -> None:
        self._all.renew(slots)
        for slot in slots:
            self._of(slot).renew((slot,))

    def victim(self) -> Slot | None:
        slot = self._all.victim()
        if slot is not None:
            self._of(slot).remove((slot,))
        return slot

    def victim_of(self, salt: str) -> Slot | None:
        """The next victim among this tenant's objects."""
        policy = self._by_tenant.get(salt)
        slot = None if policy is None else policy.victim()
        if slot is not None:
            assert slot.key.cache_salt == salt, "a tenant evicts only its own"
            self._all.remove((slot,))
        return slot

    def forget(self, salt: str) -> None:
        """The tenant has nothing left; so there is nothing to remember about it."""
        policy = self._by_tenant.pop(salt, None)
        assert policy is None or not len(policy), "a tenant with evictable objects cannot be forgotten"

    def _of(self, slot: Slot) -> EvictionPolicy:
        salt: str = slot.key.cache_salt
        policy = self._by_tenant.get(salt)
        if policy is None:
            self._by_tenant[salt] = policy = self._factory()
        return policy
