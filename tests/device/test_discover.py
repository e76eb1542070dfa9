"""Discovery: every layout is found from what an engine knows, and what could be two things is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvcore.device.discover import normalize_kv_and_discover_format
from kvcore.device.examples import EXAMPLES, Shape, build
from kvcore.device.formats import EngineKVFormat, LayoutHints
from kvcore.errors import ConfigError

discover = normalize_kv_and_discover_format


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_layout_is_found_and_every_question_answered(name: str) -> None:
    shape = Shape()
    example = build(name, shape)
    kv = discover(example.kv, example.hints)
    assert kv.format is example.format
    layout = kv.layout
    assert (layout.num_layers, layout.num_blocks, layout.block_tokens) == (shape.layers, shape.blocks, shape.tokens)
    if "NH" in layout.format.axes:
        assert (layout.num_heads, layout.head_size) == (shape.heads, shape.size)
    assert len(kv.planes.planes) == shape.layers * len(layout.parts)
    assert layout.block_bytes == kv.planes.block_bytes
    assert layout.chunk_bytes(4 * shape.tokens) == kv.planes.chunk_bytes(4)
    assert kv.planes.token_separable is not layout.format.is_opaque
    assert str(shape.tokens) in str(layout)


@pytest.mark.parametrize("format", [each for each in EngineKVFormat if not each.is_opaque])
def test_counts_alone_decide_where_sizes_differ(format: EngineKVFormat) -> None:
    """What an engine's configuration always knows, without naming a format."""
    example = build(format.name, Shape(layers=3, blocks=11, tokens=16, heads=4, size=8))
    found = discover(example.kv, Shape(layers=3, blocks=11, tokens=16, heads=4, size=8).hints())
    assert found.format is format


def test_opaque_blocks_and_states_are_never_guessed() -> None:
    blocks, states = build("LAYERS_OPAQUE", Shape()), build("STATES", Shape())
    counts = Shape().hints()
    assert discover(blocks.kv, counts).format is EngineKVFormat.LAYERS_FUSED_HND
    with pytest.raises(ConfigError, match="recurrent=True"):
        discover(states.kv, counts)
    with pytest.raises(ConfigError, match="need the hint block_tokens"):
        discover(blocks.kv, LayoutHints(opaque="halves"))


def zeros(*sizes: int, **more: Any) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=torch.float16, **more)


AMBIGUOUS: dict[str, tuple[Any, LayoutHints, str]] = {
    "K/V axis or two blocks": (
        [zeros(2, 2, 16, 4, 8)],
        LayoutHints(block_tokens=16),
        "LAYERS_KV_BLOCKS_NHD.*LAYERS_BLOCKS_KV_NHD.*The hint format decides",
    ),
    "as many heads as tokens": (
        [zeros(9, 16, 16, 64)],
        LayoutHints(num_blocks=9, block_tokens=16, num_heads=16),
        "LAYERS_FUSED_NHD.*LAYERS_FUSED_HND.*The hint format decides",
    ),
    "tokens or heads": (
        [zeros(9, 16, 8, 64)],
        LayoutHints(num_blocks=9),
        "The hint block_tokens or num_heads or format decides",
    ),
    "two layers of pairs, or K and V of two layers": (
        [[zeros(9, 16, 4, 8)] * 2] * 2,
        LayoutHints(block_tokens=16),
        "PAIRS_NHD.*LISTS_NHD.*The hint format decides",
    ),
    "layers or blocks first": (
        zeros(6, 6, 16, 32),
        LayoutHints(block_tokens=16),
        "CROSS_LATENT.*CROSS_BLOCKS_FIRST_LATENT.*The hint format decides",
    ),
    "how many layers": (
        zeros(3, 6, 16, 32),
        LayoutHints(block_tokens=16),
        "The hint num_layers or num_blocks or format decides",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_can_be_two_things_is_refused_with_the_hint_that_decides(name: str) -> None:
    kv, hints, text = AMBIGUOUS[name]
    with pytest.raises(ConfigError, match=f"(?s)can be read in 2 ways.*{text}"):
        discover(kv, hints)


@pytest.mark.parametrize("format", [EngineKVFormat.LAYERS_KV_BLOCKS_NHD, EngineKVFormat.LAYERS_BLOCKS_KV_NHD])
def test_the_named_format_decides(format: EngineKVFormat) -> None:
    kv = discover([zeros(2, 2, 16, 4, 8)], LayoutHints(format=format))
    assert kv.format is format
    steps = {EngineKVFormat.LAYERS_KV_BLOCKS_NHD: 1024, EngineKVFormat.LAYERS_BLOCKS_KV_NHD: 2048}
    assert kv.planes.planes[0].block_stride_bytes == steps[format]


REFUSED: dict[str, tuple[Any, LayoutHints, str]] = {
    "nothing": ([], LayoutHints(), "none empty"),
    "no tensors": ([1, 2], LayoutHints(), "none empty"),
    "too many axes": ([zeros(2, 2, 2, 2, 2, 2)], LayoutHints(), "6 axes instead of 5"),
    "another number of layers": ([zeros(4, 16, 8)], LayoutHints(num_layers=2), "num_layers would be 1, not 2"),
    "another block size": ([zeros(4, 16, 8)], LayoutHints(block_tokens=32), "block_tokens would be 16, not 32"),
    "odd fused dimension": ([zeros(4, 16, 2, 7)], LayoutHints(), "last dimension of 7"),
    "no K/V axis": ([zeros(3, 3, 16, 2, 8)], LayoutHints(), "K/V axis would be of size 3"),
    "an empty axis": ([zeros(0, 16, 8)], LayoutHints(), "an axis is empty"),
    "mixed shapes": ([zeros(4, 16, 8), zeros(4, 16, 9)], LayoutHints(), "differ in shape or dtype"),
    "mixed dtypes": ([zeros(4, 16, 8), torch.zeros(4, 16, 8)], LayoutHints(), "differ in shape or dtype"),
    "a pool of unknown blocks": ([[zeros(64, 4, 8)] * 3, [zeros(64, 4, 8)] * 3], LayoutHints(), "hint block_tokens"),
    "a pool that does not divide": (
        [[zeros(60, 4, 8)] * 3, [zeros(60, 4, 8)] * 3],
        LayoutHints(block_tokens=16),
        "no whole number of blocks",
    ),
    "two devices": ([zeros(4, 16, 8), zeros(4, 16, 8, device="meta")], LayoutHints(), "several devices"),
    "another container": (zeros(4, 16, 8), LayoutHints(format=EngineKVFormat.LAYERS_LATENT), "no format is nested"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_fits_nothing_is_refused_with_the_reasons(name: str) -> None:
    kv, hints, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text):
        discover(kv, hints)


def test_layers_that_lie_in_different_orders_are_refused() -> None:
    memory = zeros(9, 16, 4, 8), zeros(9, 4, 16, 8).transpose(1, 2)
    with pytest.raises(ConfigError, match="different orders"):
        discover(list(memory), LayoutHints(block_tokens=16))


def test_memory_that_shows_one_byte_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        discover([zeros(1, 16, 8).expand(4, 16, 8)], LayoutHints())


def test_strides_that_three_levels_do_not_describe_are_refused() -> None:
    with pytest.raises(ConfigError, match="not one run"):
        discover([zeros(4, 16, 8, 2)[..., 0]], LayoutHints())


@pytest.mark.parametrize(
    ("hint", "text"),
    [({"block_tokens": 0}, "block_tokens"), ({"num_layers": True}, "num_layers"), ({"head_size": 1.5}, "head_size")],
)
def test_hints_that_are_no_counts_are_refused(hint: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LayoutHints(**hint)


def test_opaque_and_recurrent_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        LayoutHints(opaque="a", recurrent=True)


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    layout = discover([zeros(4, 16, 8)]).layout
    assert layout.chunk_bytes(32) == 2 * 16 * 8 * 2
    for tokens in (0, 8, 24):
        with pytest.raises(ConfigError, match="whole number of blocks"):
            layout.chunk_bytes(tokens)


def test_one_layer_can_be_asked_for() -> None:
    example = build("LAYERS_KV_BLOCKS_NHD", Shape())
    kv = discover(example.kv, example.hints)
    planes, offset = kv.planes_of_layer(1, 2)
    assert (planes.planes, offset) == (kv.planes.planes[2:4], 2 * kv.planes.block_bytes // 3)


def test_facts_of_formats_agree_with_their_axes() -> None:
    assert EngineKVFormat.LAYERS_LATENT.is_mla
    assert not EngineKVFormat.LAYERS_OPAQUE.is_mla
    assert EngineKVFormat.CROSS_FUSED_HND.is_hnd
    assert EngineKVFormat.CROSS_FUSED_HND.is_fused
    assert EngineKVFormat.CROSS_FUSED_HND.is_cross_layer
    for each in EngineKVFormat:
        assert each.is_hnd == each.name.endswith("HND")
        assert each.other_order().other_order() is each
        assert (each.other_order() is not each) == each.name.endswith(("HND", "NHD"))
        assert len(each.kv_parts) == (2 if "2" in each.axes or each.container in ("pairs", "lists") else 1)


def test_nothing_of_this_package_needs_torch_to_be_imported() -> None:
    code = """
import sys
sys.modules["torch"] = None
from kvcore.device import discover, examples, fingerprint, formats, planes, reference, selftest
from kvcore.errors import ConfigError
try:
    examples.build("LAYERS_LATENT", examples.Shape())
except ConfigError as error:
    assert "kvcore[torch]" in str(error)
    print("named")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("named\n", 0), done.stderr
