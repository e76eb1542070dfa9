"""The torch reference against two oracles that share no code with it: the address formula, and what the axes mean."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from kvcore.device.discover import PagedKV, normalize_kv_and_discover_format
from kvcore.device.examples import EXAMPLES, Example, Shape, build
from kvcore.device.planes import Plane
from kvcore.device.reference import gather, scatter
from kvcore.errors import CallerError

DTYPES = ["uint8", "float8_e4m3fn", "bfloat16", "float16", "float32", "int64"]
POISON = 0xEE


def found(example: Example) -> PagedKV:
    return normalize_kv_and_discover_format(example.kv, example.hints)


def chunks_for(kv: PagedKV, count: int, blocks: int, fill: int = POISON) -> list[torch.Tensor]:
    size = kv.planes.chunk_bytes(blocks)
    return [torch.full((size,), fill, dtype=torch.uint8) for _ in range(count)]


def runs(plane: Plane, blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """(address of a run, position of its block in the chunk, its token) in chunk order, by the formula of planes.py."""
    for index, block in enumerate(blocks):
        for outer in range(plane.outer_count):
            for token in range(plane.tokens):
                inside = outer * plane.outer_stride_bytes + token * plane.token_stride_bytes
                yield plane.base + block * plane.block_stride_bytes + inside, index, token


def expected_chunk(kv: PagedKV, blocks: list[int]) -> bytes:
    return b"".join(
        ctypes.string_at(address, plane.run_bytes)
        for plane in kv.planes.planes
        for address, _, _ in runs(plane, blocks)
    )


def storages(kv: PagedKV) -> dict[int, bytes]:
    """All memory that the engine's tensors stand on."""
    found = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in kv.parts}
    return {address: ctypes.string_at(address, size) for address, size in found.items()}


def write(memory: dict[int, bytearray], address: int, data: bytes) -> None:
    base = max(start for start in memory if start <= address)
    memory[base][address - base : address - base + len(data)] = data


def scattered(kv: PagedKV, rows: list[list[int]], chunks: list[bytes], skips: list[int]) -> dict[int, bytes]:
    """The engine's memory after a scatter, by the formula."""
    memory = {base: bytearray(data) for base, data in storages(kv).items()}
    for blocks, chunk, skip in zip(rows, chunks, skips, strict=True):
        at = 0
        for plane in kv.planes.planes:
            for address, index, token in runs(plane, blocks):
                if index * kv.planes.block_tokens + (token if plane.token_separable else 0) >= skip:
                    write(memory, address, chunk[at : at + plane.run_bytes])
                at += plane.run_bytes
        assert at == len(chunk)
    return {base: bytes(data) for base, data in memory.items()}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[list[int]]]:
    """Odd sizes, any order of blocks, each block at most once."""
    shape = Shape(
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 9)),
        tokens=draw(st.sampled_from([1, 2, 3, 5, 16])),
        heads=draw(st.sampled_from([1, 2, 3])),
        size=draw(st.sampled_from([1, 2, 5, 8])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    order = draw(st.permutations(range(shape.blocks)))
    width = draw(st.integers(1, shape.blocks))
    rows = [list(order[at : at + width]) for at in range(0, shape.blocks - width + 1, width)]
    return shape, rows


@pytest.mark.parametrize("name", EXAMPLES)
@given(cases())
@settings(max_examples=20, deadline=None)
def test_gather_takes_the_bytes_that_the_formula_names(name: str, case: tuple[Shape, list[list[int]]]) -> None:
    shape, rows = case
    kv = found(build(name, shape))
    before = storages(kv)
    chunks = chunks_for(kv, len(rows), len(rows[0]))
    gather(kv, rows, chunks)
    assert [bytes(chunk.numpy()) for chunk in chunks] == [expected_chunk(kv, blocks) for blocks in rows]
    assert storages(kv) == before


@pytest.mark.parametrize("name", EXAMPLES)
@given(cases(), st.data())
@settings(max_examples=20, deadline=None)
def test_scatter_writes_the_wanted_tokens_and_nothing_else(
    name: str, case: tuple[Shape, list[list[int]]], data: st.DataObject
) -> None:
    shape, rows = case
    kv = found(build(name, shape))
    tokens = len(rows[0]) * kv.planes.block_tokens
    unit = 1 if kv.planes.token_separable else kv.planes.block_tokens
    skips = [unit * data.draw(st.integers(0, tokens // unit)) for _ in rows]
    salt = data.draw(st.integers(0, 250))
    chunks = chunks_for(kv, len(rows), len(rows[0]))
    for index, chunk in enumerate(chunks):
        chunk.copy_((torch.arange(len(chunk)) * 31 + salt + index * 7) % 251)
    expected = scattered(kv, rows, [bytes(chunk.numpy()) for chunk in chunks], skips)
    scatter(kv, rows, chunks, skips)
    assert storages(kv) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_was_gathered_can_be_scattered_elsewhere_and_gathered_again(name: str) -> None:
    kv = found(build(name, Shape(dtype="float32")))
    first, again = chunks_for(kv, 2, 2), chunks_for(kv, 2, 2)
    gather(kv, [[3, 1], [0, 6]], first)
    scatter(kv, [[5, 2], [4, 3]], first)
    gather(kv, [[5, 2], [4, 3]], again)
    assert [bytes(chunk.numpy()) for chunk in again] == [bytes(chunk.numpy()) for chunk in first]


def element(example: Example, axes: tuple[str, ...], at: dict[str, int], shape: Shape) -> Any:
    """The HS elements of (layer, K or V, block, token, head), read through the engine's own tensors."""
    kv, layer, part = example.kv, at["L"], at["2"]
    values = list(kv.values()) if isinstance(kv, dict) else kv
    container = (example.hints.format or example.format).container
    nested = {"layers": lambda: values[layer], "cross": lambda: kv, "pairs": lambda: values[layer][part]}
    tensor = values[part][layer] if container == "lists" else nested[container]()
    at = at | {"NB*BS": at["NB"] * shape.tokens + at["BS"]}
    return tensor[tuple(at[axis] for axis in axes[:-1])]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ("LAYERS_OPAQUE", "STATES")])
def test_a_chunk_holds_by_layer_k_before_v_by_block_in_the_order_of_the_format(name: str) -> None:
    shape = Shape(layers=2, blocks=5, tokens=3, heads=2, size=4)
    example = build(name, shape)
    kv = found(example)
    axes = (example.hints.format or example.format).axes
    heads = shape.heads if "NH" in axes else 1
    head_major = kv.planes.planes[0].outer_count > 1
    assert head_major == (kv.format.is_hnd or name == "K and V sliced from a fused tensor")
    blocks, expected = [4, 0, 2], b""
    pairs = [(h, t) for h in range(heads) for t in range(shape.tokens)]
    for layer in range(shape.layers):
        for part in range(len(kv.layout.parts)):
            for block in blocks:
                for head, token in pairs if head_major else sorted(pairs, key=lambda pair: (pair[1], pair[0])):
                    at = {"L": layer, "2": part, "NB": block, "BS": token, "NH": head}
                    values = element(example, axes, at, shape)
                    expected += values.contiguous().view(torch.uint8).numpy().tobytes()
    (chunk,) = chunks_for(kv, 1, 3)
    gather(kv, [blocks], [chunk])
    assert bytes(chunk.numpy()) == expected


def test_layer_after_layer_gives_the_same_chunk() -> None:
    kv = found(build("LAYERS_BLOCKS_KV_HND", Shape()))
    whole, pieces = chunks_for(kv, 2, 2), chunks_for(kv, 2, 2)
    rows = [[3, 1], [0, 6]]
    gather(kv, rows, whole)
    for layer in range(3):
        planes, offset = kv.planes_of_layer(layer, 2)
        end = offset + planes.chunk_bytes(2)
        layout = replace(kv.layout, num_layers=1)
        alone = replace(kv, layout=layout, layers=(kv.layers[layer],), planes=kv.planes_of_layer(layer, 1)[0])
        gather(alone, rows, [chunk[offset:end] for chunk in pieces])
    assert all(map(torch.equal, whole, pieces))


def test_bytes_that_are_no_numbers_survive() -> None:
    """Signalling NaNs, whose quiet bit a float move may set."""
    raw = torch.tensor([0x7F800001, 0x7FA00000, -0x400001], dtype=torch.int32).repeat(2 * 16 * 8).view(3, 16, 16)
    kv = normalize_kv_and_discover_format([raw.view(torch.float32)])
    (chunk,) = chunks_for(kv, 1, 2)
    gather(kv, [[2, 0]], [chunk])
    assert torch.equal(chunk.view(torch.int32).view(2, 16, 16), raw[[2, 0]])


def test_calls_that_cannot_be_right_move_nothing() -> None:
    kv = found(build("LAYERS_LATENT", Shape()))
    before = storages(kv)
    good = chunks_for(kv, 1, 2)
    wrong = {
        "does not exist": ([[0, 7]], good),
        "2 chunks for 1": ([[0, 1]], good * 2),
        "dense bytes": ([[0, 1]], [good[0][:-1]]),
        "not torch.int8": ([[0, 1]], [good[0].view(torch.int8)]),
    }
    for text, (rows, chunks) in wrong.items():
        for call in (gather, scatter):
            with pytest.raises(CallerError, match=text):
                call(kv, rows, chunks)
    with pytest.raises(CallerError, match="twice"):
        scatter(kv, [[1, 1]], good)
    opaque = found(build("LAYERS_OPAQUE", Shape()))
    with pytest.raises(CallerError, match="inner order"):
        scatter(opaque, [[1, 2]], chunks_for(opaque, 1, 2), [3])
    assert storages(kv) == before
    assert bool((good[0] == POISON).all())
