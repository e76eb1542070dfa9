"""The round trip when pages are registered: through the simulated device and through real threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore.connectors.page_check import check_pages
from kvcore.errors import InternalError
from kvcore.ports import Copy
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.copy import SimCopyEngine


def dense(blocks: int = 9) -> Any:
    return np.arange(blocks * 2 * 24, dtype=np.uint8).reshape(blocks, 2, 24)


def layers_apart() -> Any:
    """[blocks, layers, bytes] in which a layer's blocks lie together, as vLLM's layer-outermost layouts have it."""
    return np.arange(2 * 9 * 24, dtype=np.uint8).reshape(2, 9, 24).transpose(1, 0, 2)


def check(pages: list[Any], spoil: Callable[[Any], Any] = lambda device: device) -> None:
    """In simulated time."""
    loop = SimLoop(1)

    async def run() -> None:
        await check_pages(pages, spoil(SimCopyEngine(loop, "device")))

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


@pytest.mark.parametrize("make", [dense, layers_apart, lambda: dense(1), lambda: dense(2)])
def test_sound_pages_pass_and_are_as_before(make: Callable[[], Any]) -> None:
    pages = [make(), make()]
    check(pages)
    assert all((each == make()).all() for each in pages)


def test_sound_pages_pass_on_real_threads() -> None:
    async def run() -> None:
        device = ThreadCopyEngine(asyncio.get_running_loop())
        try:
            await check_pages([dense(), layers_apart()], device)
        finally:
            device.close()

    asyncio.run(run())


def test_the_check_waits_for_what_the_engine_still_computes() -> None:
    """The engine clears its pages late; were the check not behind it, it would put back what was there before."""
    pages, loop = dense(), SimLoop(1)

    async def run() -> None:
        device = SimCopyEngine(loop, "device")
        device.run_compute(lambda: pages.fill(0), 1_000_000)
        await check_pages([pages], device)

    loop.run_until_complete(run())
    loop.close()
    assert not pages.any()


class Spoiled:
    """A device in which `change` is made to every copy."""

    def __init__(self, inner: Any, change: Callable[[Copy], Copy]) -> None:
        self._inner, self._change = inner, change

    def compute_event(self) -> Any:
        return self._inner.compute_event()

    def submit(self, copies: Any, *, stream: str, after: Any = ()) -> Any:
        return self._inner.submit([self._change(copy) for copy in copies], stream=stream, after=after)


def nothing(copy: Copy) -> Copy:
    return Copy(copy.source, np.zeros(48, np.uint8))


def one_byte_less(copy: Copy) -> Copy:
    return Copy(_flat(copy.source)[:-1], _flat(copy.target)[:-1])


def _flat(buffer: Any) -> Any:
    return np.asarray(buffer).reshape(-1)


@pytest.mark.parametrize(
    ("change", "text"),
    [(nothing, "from byte 0 on"), (one_byte_less, "block 8, which was written, differs from byte 47")],
)
def test_a_device_that_does_not_move_every_byte_is_found(change: Callable[[Copy], Copy], text: str) -> None:
    pages = dense()
    with pytest.raises(InternalError, match=text):
        check([pages], lambda device: Spoiled(device, change))
    assert (pages == dense()).all()


def test_a_device_that_reads_something_else_is_found() -> None:
    def reads_zeroes(copy: Copy) -> Copy:
        to_page = isinstance(copy.source, memoryview)
        return copy if to_page else Copy(np.zeros(48, np.uint8), copy.target)

    with pytest.raises(InternalError, match="what was read from block 8"):
        check([dense()], lambda device: Spoiled(device, reads_zeroes))


def test_a_copy_that_fails_is_told() -> None:
    def refused(device: SimCopyEngine) -> SimCopyEngine:
        device.close()
        return device

    with pytest.raises(Exception, match="closed"):
        check([dense()], refused)


def test_pages_that_lie_over_their_neighbours_are_found() -> None:
    """A stride that is too short: the next block begins inside this one."""
    memory = np.zeros(1000, np.uint8)
    pages = np.lib.stride_tricks.as_strided(memory, (9, 2, 24), (40, 24, 1))
    with pytest.raises(InternalError, match="which nobody wrote"):
        check([pages])
