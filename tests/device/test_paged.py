"""`PagedCopy`: what is refused before a byte moves, and the same bytes by every mover through every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvcore.device.cpu_engine import CpuCopyEngine
from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.device.discover import PagedKV, normalize_kv_and_discover_format
from kvcore.device.examples import EXAMPLES, Shape, build
from kvcore.device.movers import Mover, NativeMover, TorchMover, cpu_mover
from kvcore.device.native import CpuKernels
from kvcore.device.paged import Direction, PagedCopy, checked, layers_of
from kvcore.device.reference import gather
from kvcore.errors import CallerError, ConfigError
from kvcore.ladder.emulated_cuda import EmulatedCuda

SHAPE = Shape(layers=2, blocks=9, tokens=16, heads=2, size=8)
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER


@pytest.fixture(params=["torch", "native"])
def mover(request: pytest.FixtureRequest) -> Mover:
    if request.param == "torch":
        return TorchMover()
    try:
        return NativeMover(CpuKernels())
    except ConfigError as error:
        pytest.skip(str(error))


def paged(name: str) -> PagedKV:
    example = build(name, SHAPE)
    return normalize_kv_and_discover_format(example.kv, example.hints)


def rows(seed: int, chunks: int = 2, blocks: int = 3) -> np.ndarray[Any, Any]:
    return np.array(Random(seed).sample(range(SHAPE.blocks), chunks * blocks)).reshape(chunks, blocks)


def expected(kv: PagedKV, ids: np.ndarray[Any, Any]) -> list[bytes]:
    chunks = [torch.zeros(kv.planes.chunk_bytes(ids.shape[1]), dtype=torch.uint8) for _ in ids]
    gather(kv, ids, chunks)
    return [chunk.numpy().tobytes() for chunk in chunks]


def carry_out(copies: Sequence[PagedCopy], mover: Mover, *, cuda: bool) -> None:
    """Through an engine, one batch after the other on one stream."""
    device = EmulatedCuda(3, mover=mover)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        engine = CudaCopyEngine(loop, device) if cuda else CpuCopyEngine(loop, mover)
        tickets = [engine.submit([copy], stream="copy") for copy in copies]
        async with asyncio.timeout(60):
            for ticket in tickets:
                await ticket.wait()
                assert ticket.error is None
        engine.close()

    try:
        asyncio.run(run())
    finally:
        device.close()


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda-emulated"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_store_and_a_load_into_other_blocks_carry_every_byte(name: str, cuda: bool, mover: Mover) -> None:
    kv = paged(name)
    ids = rows(1)
    stored = expected(kv, ids)
    chunks = [bytearray(len(stored[0])) for _ in ids]
    elsewhere = rows(2)
    carry_out([PagedCopy(GATHER, kv, ids, chunks), PagedCopy(SCATTER, kv, elsewhere, chunks)], mover, cuda=cuda)
    assert [bytes(chunk) for chunk in chunks] == stored
    assert expected(kv, elsewhere) == stored


@pytest.mark.parametrize("name", ["LAYERS_KV_BLOCKS_NHD", "CROSS_FUSED_HND", "PAIRS_HND", "padded blocks", "STATES"])
def test_layer_by_layer_gives_the_bytes_of_the_whole(name: str, mover: Mover) -> None:
    kv = paged(name)
    ids = rows(5)
    whole = expected(kv, ids)
    chunks = [bytearray(len(whole[0])) for _ in ids]
    copies = []
    for layer in range(len(kv.layers)):
        part, where = layers_of(kv, layer, layer + 1, ids.shape[1])
        copies.append(PagedCopy(GATHER, part, ids, [memoryview(chunk)[where] for chunk in chunks]))
    carry_out(copies, mover, cuda=False)
    assert [bytes(chunk) for chunk in chunks] == whole


def test_a_load_may_read_from_memory_that_it_must_not_write(mover: Mover) -> None:
    kv = paged(next(iter(EXAMPLES)))
    ids = rows(1)
    stored = expected(kv, ids)
    carry_out([PagedCopy(SCATTER, kv, rows(2), stored)], mover, cuda=False)
    assert expected(kv, rows(2)) == stored


def test_skipped_tokens_are_left_alone(mover: Mover) -> None:
    kv = paged(next(name for name in EXAMPLES if paged(name).planes.token_separable))
    ids = rows(3, chunks=1)
    before = expected(kv, ids)[0]
    chunk = bytes(255 - byte for byte in before)
    carry_out([PagedCopy(SCATTER, kv, ids, [chunk], [SHAPE.tokens + 5])], mover, cuda=False)
    after = np.frombuffer(expected(kv, ids)[0], np.uint8)
    unchanged = (after == np.frombuffer(before, np.uint8)).mean()
    assert unchanged == pytest.approx((SHAPE.tokens + 5) / (3 * SHAPE.tokens))


def wrong_copies() -> dict[str, PagedCopy]:
    kv = paged(next(iter(EXAMPLES)))
    ids = rows(1)
    size = kv.planes.chunk_bytes(3)
    chunks = [bytearray(size) for _ in ids]
    outside = np.where(ids == ids[0, 0], SHAPE.blocks, ids)
    twice = np.where(ids == ids[0, 0], ids[1, 2], ids)
    shared = memoryview(bytearray(2 * size))
    return {
        "block out of range": PagedCopy(GATHER, kv, outside, chunks),
        "negative block": PagedCopy(SCATTER, kv, -1 - ids, chunks),
        "one block for two chunks": PagedCopy(SCATTER, kv, twice, chunks),
        "short chunk": PagedCopy(GATHER, kv, ids, [chunks[0], bytearray(size - 1)]),
        "long chunk": PagedCopy(GATHER, kv, ids, [chunks[0], bytearray(size + 1)]),
        "chunk too few": PagedCopy(GATHER, kv, ids, chunks[:1]),
        "read-only chunk": PagedCopy(GATHER, kv, ids, [chunks[0], bytes(size)]),
        "strided chunk": PagedCopy(SCATTER, kv, ids, [chunks[0], shared[::2]]),
        "overlapping chunks": PagedCopy(GATHER, kv, ids, [shared[:size], shared[1 : size + 1]]),
        "no buffer": PagedCopy(GATHER, kv, ids, [chunks[0], None]),
        "gather that skips": PagedCopy(GATHER, kv, ids, chunks, [0, 1]),
        "too many tokens skipped": PagedCopy(SCATTER, kv, ids, chunks, [0, 3 * SHAPE.tokens + 1]),
    }


@pytest.mark.parametrize("name", wrong_copies())
def test_what_would_touch_other_bytes_is_refused_at_the_call(name: str) -> None:
    with pytest.raises(CallerError):
        checked(wrong_copies()[name])


def test_the_compiled_mover_is_taken_where_it_was_built() -> None:
    try:
        CpuKernels()
    except ConfigError:
        assert cpu_mover().name == "torch"
    else:
        assert cpu_mover().name == "native"
