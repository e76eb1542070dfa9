"""Rates of this machine that no engine is needed for: plain copies of memory, and the L2 through the cache.

Each figure is the median of `ROUNDS` runs. A large copy gives the bandwidth, many copies of a block the cost of one;
a retrieve of one chunk from L2 gives its latency, one of many its bandwidth. The L2's files were just written, so they
usually come from the operating system's cache: that is the rate of a warm file store, and the report says so.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcore.errors import OutOfRoomError
from kvcore.inprocess import Cache
from kvcore.keys import Namespace

ROUNDS = 5
COPY_BYTES = 64 << 20
BLOCK_BYTES = 4096
BLOCKS = 2000
CHUNK_BYTES = 1 << 20
CHUNKS = 32
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second and seconds."""

    copy_Bps: float
    block_s: float
    l2_Bps: float
    l2_latency_s: float


def measure_rates(store: Path | None = None) -> Rates:
    """All four."""
    copy, block = copy_rates()
    bandwidth, latency = l2_rates(store)
    return Rates(copy, block, bandwidth, latency)


def copy_rates() -> tuple[float, float]:
    """(bytes per second of a large copy, seconds of a copy of one small block)."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    large = _median(lambda: np.copyto(target, source))
    blocks = [slice(at * BLOCK_BYTES, (at + 1) * BLOCK_BYTES) for at in range(BLOCKS)]

    def small() -> None:
        for block in blocks:
            target[block] = source[block]

    return COPY_BYTES / large, _median(small) / BLOCKS


def l2_rates(store: Path | None) -> tuple[float, float]:
    """(bytes per second, latency of one chunk) of a file L2 through the cache."""
    with tempfile.TemporaryDirectory(dir=store, prefix="kvcore-rates-") as folder:
        tokens = range(CHUNKS * CHUNK_TOKENS)
        with Cache.open(
            namespace=Namespace("calibrate-rates", kv_dtype="uint8"),
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
            l1_bytes=4 * CHUNKS * CHUNK_BYTES,
            l2=Path(folder).as_uri(),
        ) as cache:
            cache.store(tokens, [bytes([number]) * CHUNK_BYTES for number in range(CHUNKS)])
            check_kept(cache, tokens, CHUNKS)
            one = _median(lambda: cache.retrieve(tokens[:CHUNK_TOKENS]), cache.drop_l1)
            many = _median(lambda: cache.retrieve(tokens), cache.drop_l1)
    return (CHUNKS - 1) * CHUNK_BYTES / max(many - one, 1e-9), one


def check_kept(cache: Cache, tokens: Sequence[int], chunks: int) -> None:
    """OutOfRoomError unless all that was stored comes back from L2. A store without room takes what it can, and what it
    cannot give is answered fast: that would be measured as a rate."""
    if cache.flush():
        cache.drop_l1()
        kept = len(cache.retrieve(tokens))
        if kept == chunks:
            return
        raise OutOfRoomError(f"the L2 store has kept {kept} of {chunks} chunks: is the disk under --store full?")
    raise OutOfRoomError("the L2 store did not take what was stored within its time: is the disk under --store full?")


def _median(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(ROUNDS):
        before()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
