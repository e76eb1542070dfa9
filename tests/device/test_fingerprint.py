"""The fingerprint: equal exactly where chunks are interchangeable."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import torch

from kvcore.device.discover import normalize_kv_and_discover_format
from kvcore.device.examples import EXAMPLES, Shape, build
from kvcore.device.fingerprint import ChunkOrder, layout_fingerprint
from kvcore.device.formats import LayoutHints
from kvcore.device.reference import gather

ROWS = [[3, 1], [0, 6]]


def fingerprint(name: str, shape: Shape, order: ChunkOrder = "planes") -> str:
    example = build(name, shape)
    return layout_fingerprint(normalize_kv_and_discover_format(example.kv, example.hints).layout, order)


def same_values(name: str, shape: Shape) -> tuple[str, tuple[bytes, ...]]:
    """Fingerprint and chunks of an engine in which (layer, part, block, token, head, element) decides each value."""
    example = build(name, shape)
    kv = normalize_kv_and_discover_format(example.kv, example.hints)
    for (layer, views), part in itertools.product(enumerate(kv.layers), range(len(kv.layout.parts))):
        view = views[part]
        tokens_first = view if kv.token_axis == 1 else view.transpose(1, 2)
        count = torch.arange(view.numel(), dtype=torch.int32).view(tokens_first.shape)
        tokens_first.copy_(count * 16 + layer * 4 + part)
    chunks = [torch.zeros(kv.planes.chunk_bytes(2), dtype=torch.uint8) for _ in ROWS]
    gather(kv, ROWS, chunks)
    return layout_fingerprint(kv.layout), tuple(bytes(chunk.numpy()) for chunk in chunks)


def test_equal_fingerprints_are_equal_chunks_of_the_same_values_and_unequal_ones_are_not() -> None:
    shape = Shape(dtype="int32")
    names = [name for name in EXAMPLES if name not in ("LAYERS_OPAQUE", "STATES")]
    found = {name: same_values(name, shape) for name in names}
    for one, other in itertools.combinations(names, 2):
        assert (found[one][0] == found[other][0]) == (found[one][1] == found[other][1]), (one, other)
    assert len({text for text, _ in found.values()}) == 5, "two orders of K and V, two of fused KV, latents"


def test_whatever_changes_the_bytes_changes_the_fingerprint() -> None:
    shapes = [
        Shape(),
        Shape(layers=4),
        Shape(tokens=8),
        Shape(heads=8),
        Shape(size=16),
        Shape(dtype="float16"),
        Shape(heads=8, size=4),
    ]
    for name in ("LAYERS_KV_BLOCKS_NHD", "LAYERS_OPAQUE", "STATES"):
        seen = [fingerprint(name, shape) for shape in shapes]
        alike = [shapes[5]] if name == "LAYERS_OPAQUE" else []  # the dtype of opaque blocks is told by the namespace
        assert len(set(seen)) == len(shapes) - len(alike), name
    assert fingerprint("LAYERS_LATENT", Shape(), "planes") != fingerprint("LAYERS_LATENT", Shape(), "blocks")


def test_the_number_of_blocks_and_where_they_lie_change_nothing() -> None:
    assert fingerprint("LAYERS_LATENT", Shape(blocks=7)) == fingerprint("LAYERS_LATENT", Shape(blocks=70))
    assert fingerprint("LAYERS_LATENT", Shape()) == fingerprint("padded blocks", Shape())
    one_head = Shape(heads=1)
    assert fingerprint("PAIRS_NHD", one_head) == fingerprint("PAIRS_HND", one_head), "one head has one order"


def test_the_name_of_an_opaque_order_counts() -> None:
    example = build("LAYERS_OPAQUE", Shape())
    seen = {
        layout_fingerprint(
            normalize_kv_and_discover_format(example.kv, LayoutHints(block_tokens=16, opaque=name)).layout
        )
        for name in ("halves", "thirds")
    }
    assert len(seen) == 2


def test_states_that_lie_transposed_are_other_bytes() -> None:
    dense = torch.zeros(5, 3, 8)
    hints = LayoutHints(recurrent=True)
    texts = {
        layout_fingerprint(normalize_kv_and_discover_format([[tensor]], hints).layout)
        for tensor in (dense, torch.zeros(5, 8, 3).transpose(1, 2))
    }
    assert len(texts) == 2


def test_the_fingerprint_is_the_same_on_every_machine() -> None:
    """Written down: a change of this text makes every stored chunk unreachable, and must be meant."""
    assert fingerprint("LAYERS_KV_BLOCKS_NHD", Shape()) == "e55b00eeb9e3b06668e9e3ef8ff34a62"
