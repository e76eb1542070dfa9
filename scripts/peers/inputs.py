"""The inputs of both sides, and how both take a time. Standard library only: both interpreters import it."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK_TOKENS = 256
TOKENS = 131_072
VOCABULARY = 151_936
ROWS, CHUNKS, WINDOW_CHUNKS = 64, 4096, 16
OBJECT_BYTES = 4096
FILES, FILE_BYTES = 16, 2 << 20
MEMORY_OBJECTS = 20_000
MODEL = "model"


def tokens() -> list[int]:
    """A prompt of 128K tokens."""
    source = random.Random(1)
    return [source.randrange(VOCABULARY) for _ in range(TOKENS)]


def holes(name: str) -> list[int | None]:
    """Per row the chunk that is missing; even rows are full attention, odd ones have a window."""
    source = random.Random(name)
    return [source.randrange(CHUNKS // 2, CHUNKS) if name == "holes" else None for _ in range(ROWS)]


def chunk_hashes(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def timed(act: Callable[[], Any], times: int) -> dict[str, float]:
    """Microseconds of one call: the median by the clock, so that pauses do not count, and the mean of the work.

    The collector of garbage is off meanwhile.
    """
    walls = []
    gc.collect()
    gc.disable()
    try:
        cpu = time.process_time()
        for _ in range(times):
            begin = time.perf_counter()
            act()
            walls.append(time.perf_counter() - begin)
        cpu_seconds = time.process_time() - cpu
    finally:
        gc.enable()
    return {"us": 1e6 * sorted(walls)[times // 2], "cpu_us": 1e6 * cpu_seconds / times}


class Watch:
    """Seconds of stretches, by the clock (`name`) and by all threads of this process (`name_cpu`)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def stop(self, name: str) -> None:
        """The stretch since `start` is over."""
        now = time.perf_counter(), time.process_time()
        self.seconds[name], self.seconds[f"{name}_cpu"] = (after - before for after, before in zip(now, self._begin))


def resident_bytes() -> int:
    """Of this process, as the kernel counts them."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def serve(make: Callable[[], Any]) -> int:
    """Answer commands (a method of what `make` gives, by name) until stdin closes. The library may print: to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side = make()
    replies.write(json.dumps(side.versions()) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        replies.write(json.dumps(getattr(side, command.pop("do"))(**command)) + "\n")
    side.close()
    return 0
