"""`L1Marks`: rare states of one L1, seen from its calls, their answers and its announcements.

`WatchedL1` tells it after each call. Each check is one comparison where nothing rare has happened: it runs for every
call of every run.

Who holds: the L1's process, for its life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcore.answers import Answer
from kvcore.keys import ObjectKey
from kvcore.memory import Slot, SlotState
from kvcore.sim.sometimes import Sometimes, sometimes

LOSER_DISCARDED = sometimes("l1.loser_discarded", "a second writer of a key came when it was resident", common=True)
LOSER_LEASED = sometimes("l1.loser_leased_resident", "a writer who lost got its read lease on the winner's object")
LATE_FINISH = sometimes("l1.late_finish_expired", "a finish_write came after its write lease and was told EXPIRED")
LATE_READ = sometimes("l1.late_read_expired", "a reader gave its lease back after the deadline and was told EXPIRED")
NO_SPACE = sometimes("l1.no_space", "a key found no room in L1", common=True)
PARTLY_REFUSED = sometimes("l1.batch_partly_refused", "some keys of a batch found room and others did not", common=True)
PINNED = sometimes("l1.no_space_all_pinned", "a key found no room and nothing could be evicted", common=True)
FRAGMENTED = sometimes("l1.no_space_fragmented", "a key found no room although enough bytes were free")
SKIPPED_LEASED = sometimes(
    "l1.eviction_skipped_leased", "an eviction passed by an older object under a lease", common=True
)
PARTLY_READ = sometimes("l1.partly_resident", "a reader found some of its keys and missed others", common=True)
TEMPORARY_GONE = sometimes("l1.temporary_gone", "a temporary object left with its last reader", common=True)
MADE_DURABLE = sometimes("l1.made_durable", "a temporary object became durable because a writer met it")
SHARED_READ = sometimes("l1.shared_read", "two owners held a lease on the same object", common=True)
EXPIRED_UNDER_HOLD = sometimes("l1.lease_expired_under_hold", "a read lease ran out while a copy still ran")
DRAINED = sometimes("l1.drained", "an object left while a copy still touched its bytes", common=True)
REUSED = sometimes("l1.drained_reused", "bytes that had drained were given to another object", common=True)


class L1Marks:
    """See the module text. An `L1Observer` too."""

    def __init__(self, marks: Sometimes) -> None:
        self._hit = marks.hit
        self._temporary: dict[ObjectKey, None] = {}
        self._drained: set[int] = set()  # offsets; asked for membership only

    # ---- L1Observer

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        if temporary:
            self._temporary[key] = None
        elif key in self._temporary:
            del self._temporary[key]
            self._hit(MADE_DURABLE)

    def removed(self, key: ObjectKey) -> None:
        self._temporary.pop(key, None)

    # ---- calls

    def reserved(self, answers: Sequence[Answer], slots: Sequence[Slot | None]) -> None:
        if self._drained:
            self._find_reused(slots)
        if Answer.NO_SPACE in answers and Answer.RESERVED in answers:
            self._hit(PARTLY_REFUSED)

    def _find_reused(self, slots: Sequence[Slot | None]) -> None:
        for slot in slots:
            if slot is not None and slot.offset in self._drained:
                self._drained.discard(slot.offset)
                self._hit(REUSED)

    def refused(self, evicted: int, size: int, largest_free: int, bytes_free: int) -> None:
        """A batch got NO_SPACE; `evicted` objects had gone for it."""
        self._hit(NO_SPACE)
        if not evicted:
            self._hit(PINNED)
        if largest_free < size <= bytes_free:
            self._hit(FRAGMENTED)

    def evicted(self, oldest: Slot | None) -> None:
        """A call has evicted; `oldest` has been resident for longest and is still there."""
        if oldest is not None and oldest.readers:
            self._hit(SKIPPED_LEASED)

    def finished(self, answers: Sequence[Answer], leased: bool) -> None:
        if Answer.DISCARDED in answers:
            self._hit(LOSER_DISCARDED)
            if leased:
                self._hit(LOSER_LEASED)
        if Answer.EXPIRED in answers:
            self._hit(LATE_FINISH)

    def aborted(self, answers: Sequence[Answer]) -> None:
        if Answer.EXPIRED in answers:
            self._hit(LATE_FINISH)

    def read(self, answers: Sequence[Answer], shared: bool) -> None:
        if Answer.UNKNOWN in answers and Answer.RESERVED in answers:
            self._hit(PARTLY_READ)
        if shared:
            self._hit(SHARED_READ)

    def unread(self, answers: Sequence[Answer], gone: int) -> None:
        """`gone` of the keys are not resident any more."""
        if Answer.EXPIRED in answers:
            self._hit(LATE_READ)
        self._hit(TEMPORARY_GONE, gone)

    def lease_expired(self, slot: Slot | None) -> None:
        if slot is not None and slot.holds:
            self._hit(EXPIRED_UNDER_HOLD)

    def unheld(self, drained: Iterable[Slot]) -> None:
        """Holds have ended on slots without an object: the bytes of those without another hold are given out again."""
        for slot in drained:
            self._hit(DRAINED)
            if slot.state is SlotState.FREE:
                self._drained.add(slot.offset)
