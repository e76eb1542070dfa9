"""Same seed, same run: 100 times in one process, and in fresh interpreters with other hash seeds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.sim.loop import SimLoop

REPEATS = 100


async def _client(loop: SimLoop, number: int, queue: asyncio.Queue[tuple[int, int]], lock: asyncio.Lock) -> None:
    stream = loop.streams["workload"]
    for request in range(4):
        await asyncio.sleep(stream.randint(0, 3) / 1000)
        async with lock:
            loop.trace.event("client.ask", number, request)
            await queue.put((number, request))
        try:
            async with asyncio.timeout(0.002):
                await asyncio.sleep(stream.randint(1, 3) / 1000)
        except TimeoutError:
            loop.trace.event("client.timeout", f"client {number}")


async def _server(loop: SimLoop, queue: asyncio.Queue[tuple[int, int]]) -> None:
    disk = loop.channel("disk")
    while True:
        number, request = await queue.get()
        disk.post(loop.trace.event, "disk.write", number, request, b"\x00\xff", delay_ns=700_000)
        jobs = {asyncio.create_task(asyncio.sleep(0.001 * (job % 2)), name=f"job {job}") for job in range(5)}
        done, _pending = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        loop.trace.event("server.first", *sorted(task.get_name() for task in done))
        for task in jobs:  # a set of tasks: its order must be that of their numbers
            loop.trace.event("server.job", task.get_name())


async def _world(loop: SimLoop) -> None:
    queue: asyncio.Queue[tuple[int, int]] = asyncio.Queue(2)
    lock = asyncio.Lock()
    server = loop.process("server")
    server.spawn(_server(loop, queue), "serve")
    loop.call_later(0.004, server.crash)
    loop.call_later(0.006, lambda: (server.restart(), server.spawn(_server(loop, queue), "serve")))
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(_client(loop, number, queue, lock))


def trace_hash(seed: int, schedule: str = "random") -> str:
    with SimLoop(seed, schedule=schedule, change_points=3) as loop:
        loop.run_until_complete(_world(loop))
        assert loop.trace.event_count > 50
        return loop.trace.hash


@pytest.mark.parametrize("schedule", ["random", "priority", "fifo"])
def test_one_seed_has_one_hash_in_100_repeats(schedule: str) -> None:
    junk = []
    hashes = set()
    for repeat in range(REPEATS):
        junk.append([object() for _ in range(repeat)])
        hashes.add(trace_hash(1, schedule))
    assert len(hashes) == 1


def test_other_seeds_have_other_hashes() -> None:
    assert len({trace_hash(seed) for seed in range(20)}) == 20


def test_fresh_interpreters_with_other_hash_seeds_give_the_same_hash() -> None:
    code = (
        "import runpy, sys\n"
        f"module = runpy.run_path({str(Path(__file__))!r})\n"
        "print(module['trace_hash'](1), module['trace_hash'](2))\n"
    )
    answers = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stderr
        answers.add(tuple(result.stdout.split()))
    assert answers == {(trace_hash(1), trace_hash(2))}
