"""What is being written: staging slots by writer tag, their write leases, and who was too late.

A tag names one writer. Two tags may stage the same key; one tag stages a key once. A slot leaves staging by publish,
discard, abort or expiry, each of which calls `end` for it, exactly once. After an expiry the tag's next call on that
key is told EXPIRED, once, unless the tag has reserved the key anew in between: then it has started afresh and nothing
of the old reservation answers for it.

Who holds, announces, frees: the writer holds a staging slot; it announces by finish or abort (or its deadline does); L1
frees. This table only knows where the slots are.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.answers import Answer
from kvcore.keys import ObjectKey
from kvcore.leases import Deadlines, LateMarks, LeaseBatch
from kvcore.memory import Slot, SlotState

StagedKeys = dict[ObjectKey, Slot]


class Staging:
    """Staging slots by tag and key. Takes no memory and gives none back."""

    def __init__(self) -> None:
        self._by_tag: dict[str, StagedKeys] = {}
        self._deadlines = Deadlines()
        self._late = LateMarks()
        self.bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_tag.values()))

    def of(self, tag: str) -> StagedKeys:
        """What the tag has staged. The caller takes slots out of it and then tells `end`."""
        return self._by_tag.get(tag) or {}

    def file(self, tag: str, slots: StagedKeys, deadline_ns: int | None) -> None:
        """Put fresh slots under the tag; one write lease for all of them."""
        assert slots
        staged = self._by_tag.get(tag)
        if staged is None:
            self._by_tag[tag] = slots
        else:
            assert staged.keys().isdisjoint(slots)
            staged.update(slots)
        self.bytes += sum([slot.extent for slot in slots.values()])
        if len(self._late):
            self._start_afresh(tag, slots)
        if deadline_ns is not None:
            batch = LeaseBatch(tag, deadline_ns, list(slots.values()))
            for slot in batch.slots:
                slot.lease = batch
            self._deadlines.add(batch)

    def end(self, tag: str, slots: list[Slot]) -> None:
        """These, already taken out of `of(tag)`, are staging no longer."""
        self.bytes -= sum([slot.extent for slot in slots])
        assert self.bytes >= 0
        for slot in slots:
            lease = slot.lease
            if lease is not None:
                lease.live -= 1
                slot.lease = None
        if tag in self._by_tag and not self._by_tag[tag]:
            del self._by_tag[tag]

    def expire(self, now_ns: int) -> Iterator[list[Slot]]:
        """Take out the slots whose write lease has run out, a batch at a time, and mark their tags as late."""
        for batch in self._deadlines.due(now_ns):
            tag: str = batch.holder
            slots = [slot for slot in batch.slots if slot.lease is batch]
            for slot in slots:
                assert self._by_tag[tag][slot.key] is slot
                del self._by_tag[tag][slot.key]
                self._late.add(tag, slot.key)
            self.end(tag, slots)
            assert not batch.live
            yield slots

    def answer_missing(self, tag: str, key: ObjectKey) -> Answer:
        """What a tag is told that has not staged this key."""
        return Answer.EXPIRED if self._late.take(tag, key) else Answer.UNKNOWN

    def slots(self) -> list[Slot]:
        return [slot for staged in self._by_tag.values() for slot in staged.values()]

    def check(self) -> None:
        for tag, staged in self._by_tag.items():
            assert staged, f"tag {tag} is kept without staging"
            for key, slot in staged.items():
                assert slot.key == key
                assert slot.state is SlotState.STAGING
                assert not slot.readers, "a reader of staging"
                assert not slot.temporary
        assert self.bytes == sum(slot.extent for slot in self.slots())

    def _start_afresh(self, tag: str, keys: StagedKeys) -> None:
        for key in keys:
            while self._late.take(tag, key):
                pass
