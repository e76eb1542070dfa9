"""The contract of L1 as a model: for every call the words that keep it, and what the world looks like afterwards.

Theory of operation
-------------------
Nothing of `kvcore.l1` is used here: buffers are counted, leases are a list, the clock is a number. The rules:

1. A staged buffer belongs to (tag, key) and is seen by no reader. Tags do not exclude each other,
   a tag excludes itself.
2. The first writer who finishes makes the key resident; later ones are discarded and change nothing in it, except that
   a durable writer makes a temporary object durable.
3. While a copy into the buffer runs, finishing is BUSY. A buffer that goes away under a copy drains: its memory counts
   as used until the copy has ended, and nobody else gets it.
4. A lease belongs to its owner. It ends by the owner's `finish_read` or at its deadline, each once; another owner's
   call changes nothing. An object with a lease is neither deleted nor evicted.
5. What runs out is EXPIRED to the late caller, and nothing else happens. How often it is said is left open.
6. A temporary object goes with its last lease, however that ends.
7. A reservation without room evicts unprotected objects, no more than it needs, and only if these do not suffice is it
   NO_SPACE. Which ones is the peer's choice; `settle` is told of them. (A peer that finds room elsewhere has kept more
   than it should; `used` shows that.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcore.ladder.conformance.peer import LEASE_UNITS

Words = frozenset[str]


def words(*allowed: str) -> Words:
    return frozenset(allowed)


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one object. `value` None: no copy has ended in it, so a reader may see anything."""

    temporary: bool
    deadline: int
    value: int | None = None
    copies: int = 0


class Contract:
    """See the module text."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.now = 0
        self.staged: dict[tuple[str, int], Buffer] = {}
        self.objects: dict[int, Buffer] = {}
        self.leases: list[tuple[str, int, int]] = []  # owner, key, deadline
        self.copies: dict[int, Buffer] = {}
        self._draining: list[Buffer] = []
        self._late: Counter[tuple[str, str, int]] = Counter()
        self._evictions = 0

    # Writing

    def reserve_write(self, tag: str, keys: Sequence[int], temporary: bool) -> tuple[Words, ...]:
        free, spare = self.room - self.used(), len(self.unprotected())
        answers: list[Words] = []
        reserved = 0
        for at, key in enumerate(keys):
            if key in keys[:at] or (key not in self.objects and (tag, key) in self.staged):
                answers.append(words("busy"))
            elif key in self.objects:
                self._meet(key, temporary)
                answers.append(words("resident"))
            elif reserved < free + spare:
                reserved += 1
                self._stage(tag, key, temporary)
                answers.append(words("reserved"))
            else:
                answers.append(words("no_space"))
        self._evictions = max(0, reserved - free)
        return tuple(answers)

    def settle(self, visible: Iterable[int]) -> str | None:
        """Follow the evictions of the last `reserve_write`; a sentence if they were not legal."""
        if not self._evictions:
            return None
        victims = [key for key in self.objects if key not in set(visible)]
        wrong = [key for key in victims if key not in self.unprotected()]
        wanted, self._evictions = self._evictions, 0
        for key in victims:
            self._drop(self.objects.pop(key))
        if wrong:
            return f"evicted {wrong[0]}, which is leased"
        return f"evicted {len(victims)} objects where {wanted} make room" if len(victims) > wanted else None

    def finish_write(self, tag: str, key: int) -> Words:
        buffer = self.staged.get((tag, key))
        if buffer is None:
            return self._late_words("write", tag, key)
        if buffer.copies:
            return words("busy")
        del self.staged[tag, key]
        if key in self.objects:
            self._meet(key, buffer.temporary)
            return words("discarded")
        self.objects[key] = buffer
        return words("published")

    def publish_and_read(self, tag: str, owner: str, key: int) -> Words:
        answer = self.finish_write(tag, key)
        if answer <= words("published", "discarded"):
            self._lease(owner, key)
        return answer

    def abort_write(self, tag: str, key: int) -> Words:
        buffer = self.staged.pop((tag, key), None)
        if buffer is None:
            return self._late_words("write", tag, key)
        self._drop(buffer)
        return words("aborted")

    def begin_copy(self, copy: int, tag: str, key: int) -> Words:
        buffer = self.staged.get((tag, key))
        if buffer is None:
            return words("unknown")
        buffer.copies += 1
        self.copies[copy] = buffer
        return words("copying")

    def end_copy(self, copy: int, value: int) -> Words:
        buffer = self.copies.pop(copy)
        buffer.copies -= 1
        buffer.value = value
        if buffer in self._draining and not buffer.copies:
            self._draining.remove(buffer)
        return words("ended")

    # Reading

    def reserve_read(self, owner: str, key: int) -> Words:
        if key not in self.objects:
            return words("unknown")
        self._lease(owner, key)
        return words("reserved")

    def holds(self, owner: str, key: int) -> bool:
        return any(lease[:2] == (owner, key) for lease in self.leases)

    def finish_read(self, owner: str, key: int) -> Words:
        own = [lease for lease in self.leases if lease[:2] == (owner, key)]
        if not own:
            return self._late_words("read", owner, key)
        self.leases.remove(min(own, key=lambda lease: lease[2]))
        self._unread(key)
        return words("released")

    # Removing, time, memory

    def delete(self, key: int) -> Words:
        if key not in self.objects:
            return words("unknown")
        if key not in self.unprotected():
            return words("locked")
        self._drop(self.objects.pop(key))
        return words("deleted")

    def pass_time(self, units: int) -> None:
        self.now += units
        for at in [at for at, buffer in self.staged.items() if buffer.deadline <= self.now]:
            self._drop(self.staged.pop(at))
            self._late["write", *at] += 1
        ended = [lease for lease in self.leases if lease[2] <= self.now]
        self.leases = [lease for lease in self.leases if lease[2] > self.now]
        for owner, key, _ in ended:
            self._late["read", owner, key] += 1
            self._unread(key)

    def used(self) -> int:
        return len(self.staged) + len(self.objects) + len(self._draining)

    def unprotected(self) -> list[int]:
        """Resident keys that nobody reads and no copy touches."""
        leased = {key for _, key, _ in self.leases}
        return [key for key, buffer in self.objects.items() if key not in leased and not buffer.copies]

    # Inside

    def _stage(self, tag: str, key: int, temporary: bool) -> None:
        self.staged[tag, key] = Buffer(temporary, self.now + LEASE_UNITS)
        if ("write", tag, key) in self._late:
            self._late["write", tag, key] = 0

    def _meet(self, key: int, temporary: bool) -> None:
        self.objects[key].temporary &= temporary

    def _lease(self, owner: str, key: int) -> None:
        self.leases.append((owner, key, self.now + LEASE_UNITS))

    def _unread(self, key: int) -> None:
        if key in self.objects and self.objects[key].temporary and key in self.unprotected():
            self._drop(self.objects.pop(key))

    def _drop(self, buffer: Buffer) -> None:
        if buffer.copies:
            self._draining.append(buffer)

    def _late_words(self, kind: str, who: str, key: int) -> Words:
        """EXPIRED to the first late call; later ones may hear it again."""
        at = (kind, who, key)
        if at not in self._late:
            return words("unknown")
        if not self._late[at]:
            return words("expired", "unknown")
        self._late[at] -= 1
        return words("expired")
