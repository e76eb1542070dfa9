"""A process is proven dead when it has ended, and never taken for another one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvcore.runtime.deaths import DeathWatch, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
PATIENCE_S = 60.0


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that names itself and then waits for the end of its input."""
    code = "from kvcore.runtime.deaths import this_process; print(this_process(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    process.stdout.close()


def test_the_death_of_a_watched_process_is_announced_once(child: tuple[subprocess.Popen[str], str]) -> None:
    process, name = child

    async def body() -> int:
        watch, died, count = DeathWatch(asyncio.get_running_loop()), asyncio.Event(), 0

        def announce() -> None:
            nonlocal count
            count += 1
            died.set()

        assert watch.watch("w", name, announce)
        process.kill()
        async with asyncio.timeout(PATIENCE_S):
            await died.wait()
        assert len(watch) == 0
        return count

    assert asyncio.run(body()) == 1


def test_a_forgotten_process_is_not_announced(child: tuple[subprocess.Popen[str], str]) -> None:
    process, name = child

    async def body() -> bool:
        watch, died = DeathWatch(asyncio.get_running_loop()), asyncio.Event()
        assert watch.watch("w", name, died.set)
        watch.forget("w")
        process.kill()
        process.wait()
        await asyncio.sleep(0)
        return died.is_set()

    assert asyncio.run(body()) is False


@pytest.mark.parametrize("change", ["start", "namespace", "pid", "shape"])
def test_what_is_not_certainly_that_process_cannot_be_watched(change: str) -> None:
    pid, start, namespace = this_process().split(":")
    names = {
        "start": f"{pid}:{int(start) + 1}:{namespace}",
        "namespace": f"{pid}:{start}:pid[1]",
        "pid": f"{2**22 + 1}:{start}:{namespace}",
        "shape": "nothing like it",
    }

    async def body() -> bool:
        return DeathWatch(asyncio.get_running_loop()).watch("w", names[change], lambda: None)

    assert asyncio.run(body()) is False


def test_this_process_can_be_watched_and_a_second_watch_replaces_the_first() -> None:
    async def body() -> int:
        watch = DeathWatch(asyncio.get_running_loop())
        assert watch.watch("w", this_process(), lambda: None)
        assert watch.watch("w", this_process(), lambda: None)
        count = len(watch)
        watch.close()
        return count

    assert asyncio.run(body()) == 1
