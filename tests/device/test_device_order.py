"""The chain of core.md 9 on a device that works behind our back: engine writes -> event -> gather -> event -> publish,
and nobody writes a block that a copy still reads. Each link that is left out is caught by bytes.

The device is emulated by a thread that draws, by a seed, whose turn it is; a wrong order shows within a few seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.ladder.cuda_mutants import DoneWhenQueued, ProducerIsNotWaitedFor
from kvcore.ladder.emulated_cuda import EmulatedCuda
from kvcore.ports import Copy

BLOCKS, BLOCK_BYTES, STEPS, SEEDS = 3, 1024, 6, range(40)


class Chain:
    """An engine that fills its blocks anew in every step, and a cache that stores and reloads them."""

    def __init__(self, device: EmulatedCuda, engine: CudaCopyEngine, *, fence: bool = True) -> None:
        self.device = device
        self.engine = engine
        self.fence = fence
        self.blocks = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.wrong: list[str] = []

    async def run(self) -> None:
        storing: list[Any] = []
        for step in range(1, STEPS + 1):
            if self.fence:
                for ticket in storing:
                    await ticket.wait()
            self._forward(step)
            storing = [self._store(step, block) for block in range(BLOCKS)]
        for ticket in storing:
            await ticket.wait()
        self.engine.close()

    def _forward(self, step: int) -> None:
        for block in range(BLOCKS):
            self.device.compute_on(self.device.compute, partial(self.blocks[block].fill, step))

    def _store(self, step: int, block: int) -> Any:
        chunk = np.zeros(BLOCK_BYTES, np.uint8)
        ticket = self.engine.submit(
            [Copy(self.blocks[block], chunk)], stream="store", after=[self.engine.compute_event()]
        )
        ticket.on_done(lambda: self._publish(step, block, chunk))
        return ticket

    def _publish(self, step: int, block: int, chunk: Any) -> None:
        if not (chunk == step).all():
            self.wrong.append(f"step {step}, block {block}: {sorted(set(chunk.tolist()))}")


def wrong_bytes(engine: type[CudaCopyEngine], seed: int, *, fence: bool = True) -> list[str]:
    device = EmulatedCuda(seed)

    async def climb() -> list[str]:
        chain = Chain(device, engine(asyncio.get_running_loop(), device), fence=fence)
        async with asyncio.timeout(60):
            await chain.run()
        return chain.wrong

    try:
        return asyncio.run(climb())
    finally:
        device.close()


def caught_at(engine: type[CudaCopyEngine], **options: bool) -> int | None:
    return next((seed for seed in SEEDS if wrong_bytes(engine, seed, **options)), None)


def test_the_whole_chain_moves_the_right_bytes_in_every_order() -> None:
    assert [wrong_bytes(CudaCopyEngine, seed) for seed in range(12)] == [[]] * 12


@pytest.mark.parametrize("mutant", [ProducerIsNotWaitedFor, DoneWhenQueued])
def test_an_engine_that_leaves_out_an_event_is_caught_by_bytes(mutant: type[CudaCopyEngine]) -> None:
    assert caught_at(mutant) is not None


def test_a_missing_fence_is_caught_by_bytes() -> None:
    assert caught_at(CudaCopyEngine, fence=False) is not None


def test_a_batch_that_is_cancelled_behind_its_producer_is_never_queued() -> None:
    device = EmulatedCuda(0)
    queued: list[Any] = []
    queue = device.queue
    device.queue = lambda stream, copy: (queued.append(copy), queue(stream, copy))[1]  # type: ignore[method-assign]

    async def scenario() -> None:
        engine = CudaCopyEngine(asyncio.get_running_loop(), device)
        device.hold(device.compute)
        device.compute_on(device.compute, lambda: None)
        ticket = engine.submit([_copy()], stream="store", after=[engine.compute_event()])
        assert ticket.cancel()
        device.release(device.compute)
        behind = engine.submit([_copy()], stream="store")
        await behind.wait()
        engine.close()

    _run(scenario, device)
    assert len(queued) == 1


def test_a_refused_copy_ends_its_batch_only_when_what_was_queued_before_it_has_landed() -> None:
    targets = [np.zeros(4096, np.uint8) for _ in range(2)]
    device = EmulatedCuda(1, lambda copy: OSError("refused") if copy.label == "bad" else None)

    async def scenario() -> None:
        engine = CudaCopyEngine(asyncio.get_running_loop(), device)
        first, second = (Copy(np.ones(4096, np.uint8), target) for target in targets)
        ticket = engine.submit([first, _copy("bad"), second], stream="load")
        await ticket.wait()
        assert isinstance(ticket.error, OSError)
        engine.close()

    _run(scenario, device)
    assert targets[0].all()
    assert not targets[1].any()


def _copy(label: str = "") -> Copy:
    return Copy(np.ones(64, np.uint8), np.zeros(64, np.uint8), label)


def _run(scenario: Callable[[], Any], device: EmulatedCuda) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    try:
        asyncio.run(bounded())
    finally:
        device.close()
