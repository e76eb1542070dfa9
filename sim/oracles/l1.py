"""`WatchedL1`: the production L1 with a judge at every call.

It keeps its own, simpler book of staging and leases from the calls and their answers alone, and says so when an answer
cannot be right: something published that was aborted or had expired, a lease released that was never taken or a second
time, an object shown to readers that nobody published, bytes that are not the key's. Memory is judged by `check()` at
rest and by the sum of used and free after every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.answers import Answer
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.leases import Owner
from kvcore.memory import Slot
from kvcore.ports import Tracer
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth

_DONE_WRITING = (Answer.PUBLISHED, Answer.DISCARDED, Answer.MISMATCH)


class WatchedL1(L1Cache):
    """Takes L1Cache's arguments after `name`, `truth`, `findings` and `tracer`."""

    def __init__(self, name: str, truth: Truth, findings: Findings, tracer: Tracer, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._name = name
        self._truth = truth
        self._findings = findings
        self._tracer = tracer
        self._staged: dict[tuple[str, ObjectKey], int | None] = {}  # -> deadline
        self._taken: dict[Owner, dict[ObjectKey, list[int | None]]] = {}  # -> deadline of each lease
        self._sessions: dict[str, dict[Owner, None]] = {}
        self._lapsed: dict[str, Owner] = {}  # session -> the last of its owners whose leases have run out
        self.ever_published: dict[ObjectKey, None] = {}

    # ---- writing

    def reserve_write(
        self, tag: str, keys: Sequence[ObjectKey], sizes: int | Sequence[int], **more: Any
    ) -> tuple[list[Answer], list[Slot | None]]:
        answers, slots = super().reserve_write(tag, keys, sizes, **more)
        for key, answer in zip(keys, answers):
            if answer is Answer.RESERVED:
                if (tag, key) in self._staged:
                    self._report("visibility", f"{tag} staged a key twice")
                self._staged[tag, key] = more.get("deadline_ns")
        self._note("l1.reserve", tag, answers)
        return answers, slots

    def finish_write(self, tag: str, keys: Sequence[ObjectKey], **more: Any) -> list[Answer]:
        answers = super().finish_write(tag, keys, **more)
        self._finished(tag, keys, answers)
        return answers

    def finish_write_and_reserve_read(
        self, tag: str, keys: Sequence[ObjectKey], owners: Sequence[Owner], **more: Any
    ) -> list[Answer]:
        answers = super().finish_write_and_reserve_read(tag, keys, owners, **more)
        self._finished(tag, keys, answers)
        for owner in owners:
            read = [key for key, answer in zip(keys, answers) if answer in (Answer.PUBLISHED, Answer.DISCARDED)]
            self._take(owner, read, more.get("deadline_ns"))
        return answers

    def _finished(self, tag: str, keys: Sequence[ObjectKey], answers: Sequence[Answer]) -> None:
        for key, answer in zip(keys, answers):
            if answer in _DONE_WRITING and self._staged.pop((tag, key), self) is self:
                self._report("visibility", f"{tag}: {answer.value} although it was aborted, expired or never reserved")
            slot = self.slot_of(key)
            if answer is not Answer.PUBLISHED or slot is None:
                continue
            right = self._truth.check(key, self.view(slot), f"published in {self._name} by {tag}")
            self.ever_published[key] = None
            if not tag.startswith("prefetch"):
                self._findings.stores_verified += right
        self._note("l1.finish", tag, answers)

    def abort_write(self, tag: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        answers = super().abort_write(tag, keys)
        for key, answer in zip(keys, answers):
            if answer is Answer.ABORTED and self._staged.pop((tag, key), self) is self:
                self._report("visibility", f"{tag} aborted what it had not staged")
        self._note("l1.abort", tag, answers)
        return answers

    # ---- reading

    def reserve_read(self, owner: Owner, keys: Sequence[ObjectKey], **more: Any) -> list[Answer]:
        answers = super().reserve_read(owner, keys, **more)
        read = [key for key, answer in zip(keys, answers) if answer is Answer.RESERVED]
        self._take(owner, read, more.get("deadline_ns"))
        self._note("l1.read", owner.session, answers)
        return answers

    def _take(self, owner: Owner, keys: Iterable[ObjectKey], deadline_ns: int | None) -> None:
        if self._lapsed and self._lapsed.get(owner.session, owner) != owner:
            del self._lapsed[owner.session]
        taken = self._taken.get(owner)
        if taken is None:
            taken = self._taken[owner] = {}
            self._sessions.setdefault(owner.session, {})[owner] = None
        for key in keys:
            if key not in self.ever_published:
                self._report("visibility", f"{owner} reads a key that was never published")
            taken.setdefault(key, []).append(deadline_ns)
        self._forget_empty(owner)

    def _forget_empty(self, owner: Owner) -> None:
        if not self._taken.get(owner, True):
            del self._taken[owner]
            owners = self._sessions[owner.session]
            del owners[owner]
            if not owners:
                del self._sessions[owner.session]

    def finish_read(self, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        answers = super().finish_read(owner, keys)
        for key, answer in zip(keys, answers):
            if answer is Answer.RELEASED:
                self._give_back(owner, key)
        self._note("l1.unread", owner.session, answers)
        return answers

    def _give_back(self, owner: Owner, key: ObjectKey) -> None:
        taken = self._taken.get(owner, {})
        if key not in taken:
            self._report("leases", f"{owner} released a lease it did not hold")
            return
        taken[key].pop()
        if not taken[key]:
            del taken[key]
        self._forget_empty(owner)

    def release_owner(self, owner: Owner) -> int:
        count = super().release_owner(owner)
        taken = self._taken.get(owner, {})
        recorded = sum(map(len, taken.values()))
        taken.clear()
        self._forget_empty(owner)
        if count != recorded:
            self._report("leases", f"{owner} gave back {count} leases at once, it had taken {recorded}")
        self._tracer.event("l1.release", self._name, owner.session, owner.generation, count)
        return count

    def expire(self, now_ns: int) -> int:
        count = super().expire(now_ns)
        self._staged = {held: end for held, end in self._staged.items() if end is None or end > now_ns}
        for owner, taken in list(self._taken.items()):
            for key, deadlines in list(taken.items()):
                taken[key] = [end for end in deadlines if end is None or end > now_ns]
                if len(taken[key]) < len(deadlines):
                    self._lapsed[owner.session] = owner
                if not taken[key]:
                    del taken[key]
            self._forget_empty(owner)
        return count

    # ---- at rest

    def protected(self, session: str) -> list[ObjectKey]:
        """Resident keys under a lease of this session, by our own book."""
        owners = self._sessions.get(session, ())
        return [key for owner in owners for key in self._taken[owner] if self.contains(key)]

    def lapsed(self, session: str) -> bool:
        """Leases have run out that this session's latest lookup had taken."""
        return session in self._lapsed

    def check_at_rest(self) -> None:
        """Nothing leased, held, staged or draining; memory adds up; every resident object holds its own bytes."""
        state = self.statistics()
        left = {name: getattr(state, name) for name in ("leases", "holds", "bytes_staging", "bytes_draining")}
        for name, value in left.items():
            if value:
                self._report("leases" if name in ("leases", "holds") else "memory", f"at rest, {name} is {value}")
        if self._taken or self._staged:
            self._report(
                "leases", f"at rest, {len(self._taken)} owners' leases and {len(self._staged)} staged keys are open"
            )
        if state.bytes_used + state.bytes_free != state.bytes_capacity:
            self._report("memory", f"used {state.bytes_used} + free {state.bytes_free} != {state.bytes_capacity}")
        if state.bytes_used != state.bytes_resident + state.bytes_staging + state.bytes_draining:
            self._report("memory", f"used {state.bytes_used} is not resident + staging + draining: {state}")
        try:
            self.check()
        except AssertionError as error:
            self._report("memory", f"the arena's own check failed: {error}")
        for key in self.resident_keys():
            slot = self.slot_of(key)
            assert slot is not None
            self._truth.check(key, self.view(slot), f"resident in {self._name}")

    # ---- helpers

    def _report(self, oracle: str, text: str) -> None:
        self._findings.report(oracle, f"L1 {self._name}: {text}")

    def _note(self, label: str, who: str, answers: Sequence[Answer]) -> None:
        self._tracer.event(label, self._name, who, *[answer.value for answer in answers])
