"""The fingerprint model without an engine: exact numbers, vLLM's own block order, the simulation's sums and tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import ModelRegistry
from vllm import _custom_ops as ops

from kvcore.ladder.targets.vllm import fingerprint_plugin
from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS
from kvcore.ladder.targets.vllm.fingerprint import (
    ARCHITECTURE,
    HEAD,
    VOCABULARY,
    WIDTH,
    TokenFingerprints,
    dense_reference,
    fingerprints,
    from_bits,
    to_bits,
)
from kvcore.ladder.targets.vllm.fingerprint_mutants import shifted
from kvcore.ladder.targets.vllm.fingerprint_pages import ROW, PageOrder, Visible
from kvcore.sim.model import build_model

POSITIONS = 512
PROMPT = tuple(2 + 7 * position % 250 for position in range(150))


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, (count, WIDTH), dtype=np.uint64)


# ---------------------------------------------------------------- numbers


def test_words_are_whole_floats_and_come_back_exactly() -> None:
    given = words(1_000)
    floats = to_bits(given).view(np.float32)
    assert (floats == np.floor(floats)).all()
    assert (floats >= 2**23).all()
    assert (floats < 2**23 + 2**16).all()
    assert (from_bits(to_bits(given)) == given).all()


def test_any_flipped_bit_of_any_float_reads_as_another_word() -> None:
    bits = to_bits(words(1))
    right = from_bits(bits)
    for place in range(ROW):
        for bit in range(32):
            wrong = bits.copy()
            wrong[0, place] ^= np.uint32(1 << bit)
            assert (from_bits(wrong) != right).sum() == 1, (place, bit)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 2.0**23 + 2**16, float("nan"), float("inf")])
def test_what_is_no_piece_of_a_word_reads_as_no_word_that_was_written(value: float) -> None:
    bits = to_bits(words(1))
    strange = np.full_like(bits.view(np.float32), value).view(np.uint32)
    assert (from_bits(strange) != from_bits(bits)).all()


# ---------------------------------------------------------------- one arithmetic


def test_the_arithmetic_is_the_simulations() -> None:
    """Shared vectors: embedding, kv, combination and tokens of a simulated model of the same size."""
    _, sim = build_model(
        "full", 1, chunk_tokens=BLOCK_TOKENS, width=WIDTH, full_block_tokens=BLOCK_TOKENS, positions_max=POSITIONS
    )
    ours = fingerprints((None, None), 1, POSITIONS)
    x = sim.embed(np.asarray(PROMPT, dtype=np.uint32), np.arange(len(PROMPT)))
    assert (ours.embed(np.asarray(PROMPT, dtype=np.uint32), np.arange(len(PROMPT))) == x).all()
    for layer in range(2):
        assert (ours.kv(layer, 0, x) == sim.kv(layer, 0, x)).all()
        assert (ours.combine(layer, x, x) == sim.combine(layer, x, x)).all()
    assert (ours.weights == sim.weights).all()
    assert ours.next_tokens(x) == [2 + token % (VOCABULARY - 2) for token in sim.next_tokens(x)]


def test_known_tokens_stay_what_they_are() -> None:
    """A changed function makes stored pages and every finding of an older run meaningless: it must be on purpose."""
    known = {None: [426, 180, 2498, 489], 64: [1964, 1211, 856, 337]}
    for window, tokens in known.items():
        model = fingerprints((None, window), 1, POSITIONS)
        assert dense_reference(model, BLOCK_TOKENS).tokens(PROMPT, len(tokens)) == tokens


# ---------------------------------------------------------------- pages


def kernel_order() -> PageOrder:
    def write(rows: Any) -> Any:
        page = torch.zeros(1, 1, BLOCK_TOKENS, ROW)
        key_cache, value_cache = page.view(1, 1, 2 * BLOCK_TOKENS, HEAD).chunk(2, dim=2)
        key, value = (half.contiguous() for half in torch.from_numpy(rows).unsqueeze(1).split(HEAD, dim=2))
        slots = torch.arange(BLOCK_TOKENS)
        ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        return page.reshape(-1).numpy()

    return PageOrder(BLOCK_TOKENS, write)


def test_the_kernel_tells_where_a_slot_is_and_a_shifted_block_is_one_of_shifted_slots() -> None:
    order = kernel_order()
    block = to_bits(words(BLOCK_TOKENS)).reshape(-1)
    slots = order.read(block[None], np.zeros(1, dtype=np.int64))[0]
    late = order.read(shifted(block)[None], np.zeros(1, dtype=np.int64))[0]
    assert (np.sort(order.places.reshape(-1)) == np.arange(BLOCK_TOKENS * ROW)).all()
    assert (late == np.roll(slots, 1, axis=0)).all()


class Paged:
    """Requests over slots of one layer list, stepped by hand with metadata as vLLM has it."""

    def __init__(self, model: TokenFingerprints, requests: int) -> None:
        blocks = POSITIONS // BLOCK_TOKENS
        self.model = model
        draws = np.random.default_rng(5)
        self.tables = 1 + draws.permutation(requests * blocks).reshape(requests, blocks)
        self.pages = np.zeros((len(model.layers), 1 + requests * blocks, BLOCK_TOKENS, ROW), dtype=np.uint32)
        self.computed = [0] * requests

    def step(self, shares: dict[int, list[int]]) -> list[int]:
        """New tokens per request; gives the next token of each."""
        who, counts = list(shares), [len(tokens) for tokens in shares.values()]
        starts = [self.computed[request] for request in who]
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        x = self.model.embed(np.concatenate([*shares.values()]).astype(np.uint32), positions)
        owners = np.repeat(who, counts)
        for layer in self.model.layers:
            window = layer.window_tokens or None
            blocks = self.tables[owners, positions // BLOCK_TOKENS]
            self.pages[layer.index, blocks, positions % BLOCK_TOKENS] = to_bits(self.model.kv(layer.index, 0, x))
            visible = Visible.of(self._metadata(who, starts, counts, window), window, BLOCK_TOKENS)
            sums = visible.sums(from_bits(self.pages[layer.index][visible.blocks]), self.model.weights)
            x = self.model.combine(layer.index, x, sums)
        for request, count in zip(who, counts, strict=True):
            self.computed[request] += count
        return self.model.next_tokens(x[np.cumsum(counts) - 1])

    def _metadata(self, who: list[int], starts: list[int], counts: list[int], window: int | None) -> Any:
        tables = self.tables[who].copy()
        if window is not None:  # blocks that have left the window are the null block, as in vLLM
            for row, start in enumerate(starts):
                tables[row, : max(0, start - window + 1) // BLOCK_TOKENS] = 0
        return SimpleNamespace(
            seq_lens=torch.tensor([start + count for start, count in zip(starts, counts, strict=True)]),
            query_start_loc=torch.tensor([0, *np.cumsum(counts)]),
            block_table=torch.from_numpy(tables),
        )


@pytest.mark.parametrize("window", [None, 1, 31, 32, 33, 63, 64, 65, 96, 500])
def test_however_work_is_cut_into_steps_tokens_are_the_dense_references(window: int | None) -> None:
    model = fingerprints((None, window), 1, POSITIONS)
    draws = np.random.default_rng(window or 0)
    prompts = [PROMPT[: int(draws.integers(1, len(PROMPT)))] for _ in range(4)]
    paged, tokens = Paged(model, len(prompts)), [list(prompt) for prompt in prompts]
    for _ in range(30):
        shares = {}
        for request, known in enumerate(tokens):
            left = len(known) - paged.computed[request]
            if draws.random() < 0.8:
                shares[request] = known[paged.computed[request] :][: int(draws.integers(1, left + 1))]
        for request, token in zip(shares, paged.step(shares) if shares else [], strict=True):
            if paged.computed[request] == len(tokens[request]):
                tokens[request].append(token)
    reference = dense_reference(model, BLOCK_TOKENS)
    for prompt, known in zip(prompts, tokens, strict=True):
        made = len(known) - len(prompt)
        assert made > 3
        assert known[len(prompt) :] == reference.tokens(prompt, made)


# ---------------------------------------------------------------- registration


def test_the_plugin_registers_only_where_the_ladder_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    monkeypatch.setattr(ModelRegistry, "register_model", lambda name, _: registered.append(name))
    monkeypatch.setattr(ModelRegistry, "get_supported_archs", lambda: registered)
    monkeypatch.delenv(fingerprint_plugin.ASKED, raising=False)
    fingerprint_plugin.register()
    assert not registered
    monkeypatch.setenv(fingerprint_plugin.ASKED, "1")
    fingerprint_plugin.register()
    fingerprint_plugin.register()
    assert registered == [ARCHITECTURE]
