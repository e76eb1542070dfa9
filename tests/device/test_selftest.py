"""The round trip at registration: it passes on every layout, leaves no trace, and finds what is wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvcore.device import reference
from kvcore.device.discover import PagedKV, normalize_kv_and_discover_format
from kvcore.device.examples import EXAMPLES, Shape, build
from kvcore.device.paged import Direction
from kvcore.device.planes import sample_blocks
from kvcore.device.selftest import steps
from kvcore.errors import InternalError


def found(name: str, shape: Shape) -> PagedKV:
    example = build(name, shape)
    return normalize_kv_and_discover_format(example.kv, example.hints)


def memory(kv: PagedKV) -> list[bytes]:
    stores = [part.untyped_storage() for part in kv.parts]
    return [ctypes.string_at(store.data_ptr(), store.nbytes()) for store in stores]


def check_round_trip(kv: PagedKV, gather: Any = reference.gather, scatter: Any = reference.scatter) -> None:
    """All steps, by movers that are done when they return."""
    with closing(steps(kv)) as moves:
        for step in moves:
            if step.direction is Direction.GATHER:
                gather(kv, step.rows, step.chunks)
            else:
                scatter(kv, step.rows, step.chunks, step.skip_tokens)


@pytest.mark.parametrize("shape", [Shape(), Shape(blocks=1, tokens=1, heads=1, size=1), Shape(blocks=2, dtype="uint8")])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_layout_passes_and_is_as_before(name: str, shape: Shape) -> None:
    kv = found(name, shape)
    before = memory(kv)
    check_round_trip(kv)
    assert memory(kv) == before


def test_the_blocks_are_far_apart_and_distinct() -> None:
    assert sample_blocks(9) == [8, 0, 4]
    assert sample_blocks(2) == [1, 0]
    assert sample_blocks(1) == [0]


Gather = Callable[[PagedKV, Any, Sequence[Any]], None]


def no_scatter(kv: PagedKV, rows: Any, chunks: Any, skip: Any = None) -> None:
    """Moves nothing."""


def scatter_one_block_further(kv: PagedKV, rows: Any, chunks: Any, skip: Any = None) -> None:
    reference.scatter(kv, rows, chunks, skip)
    further = [[(block + 1) % kv.layout.num_blocks for block in row] for row in rows]
    reference.scatter(kv, further, chunks, skip)


def scatter_into_a_neighbour_as_well(kv: PagedKV, rows: Any, chunks: Any, skip: Any = None) -> None:
    reference.scatter(kv, rows, chunks, skip)
    reference.scatter(kv, [[1]], chunks[:1])


def scatter_that_never_skips(kv: PagedKV, rows: Any, chunks: Any, skip: Any = None) -> None:
    reference.scatter(kv, rows, chunks)


def scatter_without_the_last_byte(kv: PagedKV, rows: Any, chunks: Any, skip: Any = None) -> None:
    changed = [chunk.clone() for chunk in chunks]
    for chunk in changed:
        chunk[-1] ^= 1
    reference.scatter(kv, rows, changed, skip)


def gather_nothing(kv: PagedKV, rows: Any, chunks: Any) -> None:
    """Moves nothing."""


def gather_in_another_order(kv: PagedKV, rows: Any, chunks: Any) -> None:
    reference.gather(kv, rows, list(reversed(chunks)))


@pytest.mark.parametrize(
    ("scatter", "text"),
    [
        (no_scatter, "layer 0, part k, byte 0"),
        (scatter_one_block_further, "differs in block"),
        (scatter_into_a_neighbour_as_well, "the block beside one that was written differs in block 1"),
        (scatter_that_never_skips, "written behind 8 tokens"),
        (scatter_without_the_last_byte, "layer 2, part v, byte 1023"),
    ],
)
def test_a_broken_scatter_is_found(scatter: Any, text: str) -> None:
    kv = found("LAYERS_BLOCKS_KV_NHD", Shape())
    with pytest.raises(InternalError, match=text):
        check_round_trip(kv, scatter=scatter)


@pytest.mark.parametrize("gather", [gather_nothing, gather_in_another_order])
def test_a_broken_gather_is_found_and_the_engine_has_its_bytes_back(gather: Gather) -> None:
    kv = found("LAYERS_BLOCKS_KV_NHD", Shape())
    before = memory(kv)
    with pytest.raises(InternalError, match="a chunk that was gathered"):
        check_round_trip(kv, gather=gather)
    assert memory(kv) == before


def test_layers_that_share_memory_are_found() -> None:
    """Each layer alone is in order; a second one over the same bytes is not."""
    tensor = torch.zeros(7, 16, 8)
    with pytest.raises(InternalError, match="layer 0, part latent"):
        check_round_trip(normalize_kv_and_discover_format([tensor, tensor]))


def test_planes_that_are_not_those_of_the_tensors_are_found() -> None:
    """A mover that works by planes, on planes of the wrong axis."""
    kv = found("LAYERS_KV_BLOCKS_NHD", Shape())
    other = found("LAYERS_KV_BLOCKS_HND", Shape())

    def scatter(kv: PagedKV, rows: Any, chunks: Any, skip: Any = None) -> None:
        reference.scatter(replace(kv, layers=swapped.layers, token_axis=swapped.token_axis), rows, chunks, skip)

    swapped = replace(
        other, layers=tuple(tuple(part.reshape(7, 4, 16, 8) for part in layer) for layer in kv.layers), token_axis=2
    )
    with pytest.raises(InternalError, match="written behind"):
        check_round_trip(kv, scatter=scatter)
