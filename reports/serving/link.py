"""One line between a tier and a worker: hauls go one after the other, in the order in which they were asked for.

A haul occupies the line for its bytes and copies; the tier's latency passes beside it (the next haul may begin). The
line measures itself as a running system would: seconds of each haul by its bytes, the share of time it is busy, how
many hauls come per second, and the bytes that were asked for and are not here yet.
"""

from __future__ import annotations

from kvcore.admission import IDLE, LineMeter, Link, Queue, ShareMeter
from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.tier import Tier, load_terms


class Haul:
    """Bytes on their way: when the line begins with them, when it is free again, when they are there."""

    __slots__ = ("begin_s", "end_s", "free_s", "size")

    def __init__(self, size: int, begin_s: float, free_s: float, end_s: float) -> None:
        self.size = size
        self.begin_s = begin_s
        self.free_s = free_s
        self.end_s = end_s


class Line:
    """See the module text. `block_tokens`: tokens per copy."""

    def __init__(self, tier: Tier, model: Model, host: Host, block_tokens: int, lookup_s: float = 0.0) -> None:
        terms = load_terms(model, tier, block_tokens=block_tokens, gpus=host.gpus, lookup_s=lookup_s)
        self.name = tier.name
        self.sm_share = tier.sm_share
        self.loads = 0
        self.loaded_bytes = 0
        self.busy_s = 0.0
        self.free_s = 0.0
        self._wait_s = terms.wait_s
        self._copy_s = terms.copy_s
        self._block_tokens = block_tokens
        self._byte_s = terms.byte_s * terms.share / model.shard_copies(host.gpus)
        self._outstanding = 0  # bytes
        self._hauls = 0
        self._meter = LineMeter()
        self._share = ShareMeter()
        self._rate = ShareMeter()
        self._idle_offers = 0

    def haul(self, now_s: float, size: int, tokens: int) -> Haul:
        """Put so many bytes in the queue."""
        assert size > 0
        copies = -(-tokens // self._block_tokens)
        begin_s = max(now_s, self.free_s)
        occupied_s = copies * self._copy_s + size * self._byte_s
        self.free_s = begin_s + occupied_s
        self.busy_s += occupied_s
        self.loads += 1
        self.loaded_bytes += size
        self._outstanding += size
        self._hauls += 1
        self._idle_offers = 0
        self._rate.add(now_s, 1.0)
        return Haul(size, begin_s, self.free_s, self.free_s + self._wait_s)

    def ended(self, now_s: float, haul: Haul) -> None:
        """The bytes are there: measure."""
        self._outstanding -= haul.size
        self._hauls -= 1
        self._meter.add(haul.size, haul.end_s - haul.begin_s)
        self._share.add(now_s, haul.free_s - haul.begin_s)

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
