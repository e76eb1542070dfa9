"""Asking again where that is safe: lookups and loads whose store failed, after a short pause with jitter.

A load may be repeated into the same buffers, which the caller keeps reserved until the task has completed; a lookup may
be repeated because every key that it found is locked exactly once, and only the others are asked again. Stores are left
alone: the write-back repeats what is answered RETRY by itself (`kvcore.writeback`), and two layers of attempts would
multiply. Unlocks and deletions are the adapter's business.

An adapter answers a failure like a miss. So keys are asked again only if the store's failures have grown while the task
ran (`failures_seen`); when many tasks run at once a plain miss may be asked a second time, which costs a call and
changes nothing.

The pause doubles from `pause_ns`, and each one is drawn between half of it and all of it, so that servers that lost one
store together do not come back in step. The chance is the clock's `token`: it moves a moment, never a decision.

Who holds: buffers stay the caller's; between two attempts nobody touches them. Who announces: the inner adapter's
notices. Who frees: `close` ends the timers; a task in its pause is then never announced, as for any adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import TaskId
from kvcore.l2.wrapped import CountingAdapter, FailuresSeen, WrappedAdapter
from kvcore.ports import Clock, Notice

_NS_PER_S = 1_000_000_000
_CHANCE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """`attempts_max` counts the first one too."""

    attempts_max: int = 2
    pause_ns: int = 20_000_000

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or self.pause_ns < 1:
            raise CallerError("a retry needs at least one attempt and a pause")


@dataclass(slots=True)
class _Task:
    """A caller's task: `inner` is the attempt that runs now, for the keys at `positions`."""

    keys: tuple[ObjectKey, ...]
    buffers: tuple[memoryview, ...]
    positions: list[int]
    inner: TaskId | None
    failures_before: int
    notice: Notice
    attempts: int = 1
    bits: int = 0
    finished: bool = False  # another attempt could not even begin
    timer: asyncio.TimerHandle | None = None


class RetryAdapter(WrappedAdapter):
    """`inner` whose failed lookups and loads are tried again. Made and used on the loop thread."""

    def __init__(
        self, inner: CountingAdapter, clock: Clock, options: RetryOptions, *, failures_seen: FailuresSeen
    ) -> None:
        super().__init__(inner)
        self.options = options
        self.retried = 0  # keys asked again
        self._clock = clock
        self._failures_seen = failures_seen
        self._loop = asyncio.get_running_loop()
        self._lookups: dict[TaskId, _Task] = {}
        self._loads: dict[TaskId, _Task] = {}

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        before = self._failures_seen()
        task = self.inner.submit_lookup_and_lock(keys)
        everything = list(range(len(keys)))
        self._lookups[task] = _Task(tuple(keys), (), everything, task, before, self.lookup_notice)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        return self._take(self._lookups, task, self.inner.take_lookup, self._look_up_again)

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        before = self._failures_seen()
        task = self.inner.submit_load(keys, buffers)
        everything = list(range(len(keys)))
        self._loads[task] = _Task(tuple(keys), tuple(buffers), everything, task, before, self.load_notice)
        return task

    def take_load(self, task: TaskId) -> int | None:
        return self._take(self._loads, task, self.inner.take_load, self._load_again)

    def close(self) -> None:
        for one in (*self._lookups.values(), *self._loads.values()):
            if one.timer is not None:
                one.timer.cancel()
        self._lookups.clear()
        self._loads.clear()
        self.inner.close()

    # -- inside

    def _take(
        self,
        table: dict[TaskId, _Task],
        task: TaskId,
        take: Callable[[TaskId], int | None],
        again: Callable[[list[ObjectKey], _Task], TaskId],
    ) -> int | None:
        one = table.get(task)
        if one is None or (one.inner is None and not one.finished):
            return None
        if one.inner is None:
            return table.pop(task).bits
        bits = take(one.inner)
        if bits is None:
            return None
        self._add(one, bits)
        if one.positions and self._worth_it(one):
            one.inner = None
            one.timer = self._loop.call_later(self._pause_s(one), self._begin, table, task, again)
            return None
        del table[task]
        return one.bits

    def _add(self, one: _Task, bits: int) -> None:
        """Bit i of an attempt stands for the i-th key that was still missing."""
        for index, position in enumerate(one.positions):
            one.bits |= (bits >> index & 1) << position
        one.positions = [position for position in one.positions if not one.bits >> position & 1]

    def _worth_it(self, one: _Task) -> bool:
        return one.attempts < self.options.attempts_max and self._failures_seen() > one.failures_before

    def _pause_s(self, one: _Task) -> float:
        whole_ns = self.options.pause_ns << (one.attempts - 1)
        share = int(self._clock.token(_CHANCE_BYTES), 16) / float(1 << 8 * _CHANCE_BYTES)
        return whole_ns * (1 + share) / 2 / _NS_PER_S

    def _begin(
        self, table: dict[TaskId, _Task], task: TaskId, again: Callable[[list[ObjectKey], _Task], TaskId]
    ) -> None:
        one = table[task]
        one.timer = None
        one.attempts += 1
        one.failures_before = self._failures_seen()
        keys = [one.keys[position] for position in one.positions]
        self.retried += len(keys)
        try:
            one.inner = again(keys, one)
        except Exception:  # refused: what the attempts before have brought is the answer
            one.finished = True
            one.notice.signal()

    def _look_up_again(self, keys: list[ObjectKey], one: _Task) -> TaskId:
        return self.inner.submit_lookup_and_lock(keys)

    def _load_again(self, keys: list[ObjectKey], one: _Task) -> TaskId:
        return self.inner.submit_load(keys, [one.buffers[position] for position in one.positions])
