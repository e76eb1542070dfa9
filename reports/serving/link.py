"""One line between a tier and a worker: hauls go one after the other, in the order in which they were asked for.

A haul occupies the line for its bytes and copies; the tier's latency passes beside it (the next haul may begin). One
that is stopped leaves the line at once: what has arrived by then is there, and the next one begins.

The line measures itself as a running system would: seconds of each haul by its bytes, the share of time it is busy, how
many hauls come per second, and the bytes that were asked for and are not here yet.

Who holds: the line, until `ended` or `stop`. Who announces: `began` and `ended` of the haul.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf

from kvcore.admission import IDLE, Link, Queue
from kvcore.admission import Line as MeasuredLine
from kvcore.meters import LineMeter, ShareMeter
from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.tier import Tier, load_terms

Call = Callable[[float], None]
After = Callable[[float, Call], None]


class Haul:
    """Bytes to be brought: when the line begins with them, when it is free again, when they are there; inf: not known.

    `began(haul)` is told when the line begins with it, `ended(now_s)` when its bytes are there, unless it was stopped.
    """

    __slots__ = ("began", "begin_s", "end_s", "ended", "free_s", "occupied_s", "size", "stopped")

    def __init__(self, size: int, occupied_s: float, began: Callable[[Haul], None], ended: Call) -> None:
        self.size = size
        self.occupied_s = occupied_s
        self.began = began
        self.ended = ended
        self.stopped = False
        self.begin_s = self.free_s = self.end_s = inf


class Line:
    """See the module text. `after(time, call)` calls back at a time. `block_tokens`: tokens per copy."""

    def __init__(
        self, tier: Tier, model: Model, host: Host, after: After, block_tokens: int, lookup_s: float = 0.0
    ) -> None:
        terms = load_terms(model, tier, block_tokens=block_tokens, gpus=host.gpus, lookup_s=lookup_s)
        self.name = tier.name
        self.sm_share = tier.sm_share
        self.loads = 0
        self.loaded_bytes = 0
        self.busy_s = 0.0
        self.free_s = 0.0  # when the line is, or was, free again
        self._after = after
        self._wait_s = terms.wait_s
        self._copy_s = terms.copy_s
        self._block_tokens = block_tokens
        self._byte_s = terms.byte_s * terms.share / model.shard_copies(host.gpus)
        self._waiting: deque[Haul] = deque()
        self._current: Haul | None = None
        self._outstanding = 0  # bytes
        self._hauls = 0
        self._meter = LineMeter()
        self._share = ShareMeter()
        self._rate = ShareMeter()
        self._idle_offers = 0

    def haul(self, now_s: float, size: int, tokens: int, began: Callable[[Haul], None], ended: Call) -> Haul:
        """Put so many bytes in the queue."""
        assert size > 0
        copies = -(-tokens // self._block_tokens)
        haul = Haul(size, copies * self._copy_s + size * self._byte_s, began, ended)
        self._waiting.append(haul)
        self._outstanding += size
        self._hauls += 1
        self._idle_offers = 0
        self._rate.add(now_s, 1.0)
        if self._current is None:
            self._next(now_s)
        return haul

    def _next(self, now_s: float) -> None:
        """Begin with the next one, if there is one."""
        self._current = haul = self._waiting.popleft() if self._waiting else None
        if haul is None:
            return
        haul.begin_s = now_s
        self.free_s = haul.free_s = now_s + haul.occupied_s
        haul.end_s = haul.free_s + self._wait_s
        self.loads += 1
        self._after(haul.end_s, lambda now_s: self._end(now_s, haul))
        self._after(haul.free_s, lambda now_s: None if haul.stopped else self._next(now_s))
        haul.began(haul)

    def _end(self, now_s: float, haul: Haul) -> None:
        """The bytes are there: measure."""
        if haul.stopped:
            return
        self._meter.add(haul.size, haul.end_s - haul.begin_s)
        self._leave(now_s, haul, haul.size, haul.occupied_s)
        haul.ended(now_s)

    def _leave(self, now_s: float, haul: Haul, size: int, seconds: float) -> None:
        self._outstanding -= haul.size
        self._hauls -= 1
        self.busy_s += seconds
        self.loaded_bytes += size
        self._share.add(now_s, seconds)

    def stoppable(self, haul: Haul) -> bool:
        """Would stopping it spare the line anything?"""
        return haul is self._current or haul.begin_s == inf

    def arrived_share(self, now_s: float, haul: Haul) -> float:
        """How much of a haul is there by now."""
        return max(now_s - self._wait_s - haul.begin_s, 0.0) / haul.occupied_s

    def stop(self, now_s: float, haul: Haul, size: int) -> None:
        """Bring no more of a stoppable haul; `size` bytes are there and are used."""
        assert not haul.stopped
        haul.stopped = True
        if haul is not self._current:
            self._waiting.remove(haul)
            self._leave(now_s, haul, 0, 0.0)
            return
        arrived = self.arrived_share(now_s, haul) * haul.size
        if arrived > 0:
            self._meter.add(arrived, now_s - haul.begin_s)
        self._leave(now_s, haul, size, now_s - haul.begin_s)
        self.free_s = now_s
        self._next(now_s)

    def passed_over(self) -> None:
        """Something was found behind this line and not loaded."""
        self._idle_offers += 1

    def measured(self, now_s: float) -> Link:
        """What the admission may see."""
        line = self._meter.line
        if line is None:
            return Link(None, hauls=self._hauls)
        queue = IDLE
        if self._outstanding or self._rate.per_second(now_s):
            work_s = line.byte_s * self._outstanding
            queue = Queue(work_s=work_s, rate=self._rate.per_second(now_s), busy=self._share.per_second(now_s))
        return Link(line, queue, self._hauls, self._idle_offers)

    def seen_by(self, now_s: float, haul: Haul, link: Link) -> Link:
        """What is measured (`link`) for one that is stoppable: in front of it and behind it. Where nothing was, one
        that is on its way is taken to last as long again as it has (Lindy's law)."""
        if link.line is None:
            return link if haul is not self._current else replace(link, line=MeasuredLine(now_s - haul.begin_s, 0.0))
        if haul is self._current:
            return replace(link, queue=replace(link.queue, waiting=len(self._waiting), work_s=0.0))
        current = self._current
        assert current is not None, "a line with hauls that wait is busy"
        at = self._waiting.index(haul)
        ahead = sum([one.size for one, _ in zip(self._waiting, range(at))])
        ahead_bytes = ahead + current.size * (1 - self.arrived_share(now_s, current))
        behind = len(self._waiting) - at - 1
        return replace(link, queue=replace(link.queue, waiting=behind, work_s=link.line.byte_s * ahead_bytes))
