"""KV bytes and attention pairs by kind of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.reports.model import Model, attention_flops, attention_pairs, kv_bytes

DENSE: dict[str, Any] = {
    "name": "dense", "layers_full": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "hidden_dim": 512,
    "params_active": 9e8, "params_total": 1e9, "weight_bytes": 2e9,
}  # fmt: skip
TOKENS = st.integers(0, 5_000)


def test_bytes_of_a_token_are_a_key_and_a_value_per_kv_head_and_layer() -> None:
    model = Model(**DENSE)
    assert model.kv_bytes_per_token() == 4 * 2 * 2 * 64 * 2
    assert kv_bytes(model, 10) == 10 * model.kv_bytes_per_token()
    assert kv_bytes(model.with_value_bytes(1), 10) == kv_bytes(model, 10) // 2


def test_a_sequence_without_tokens_holds_nothing_even_with_a_state() -> None:
    assert kv_bytes(Model(**DENSE, layers_recurrent=2, state_bytes=1_000), 0) == 0


def test_an_mla_row_replaces_keys_and_values() -> None:
    assert Model(**{**DENSE, "latent_dim": 576}).kv_bytes_per_token() == 4 * 576 * 2


def test_window_layers_grow_to_a_constant() -> None:
    model = Model(**DENSE, layers_window=3, window_tokens=100)
    row = model.layer_bytes_per_token()
    assert kv_bytes(model, 60) == 60 * 7 * row
    assert kv_bytes(model, 1000) == 1000 * 4 * row + 100 * 3 * row
    assert model.constant_bytes() == 100 * 3 * row


def test_any_hit_loads_the_recurrent_state() -> None:
    model = Model(**DENSE, layers_recurrent=2, state_bytes=1_000_000)
    assert kv_bytes(model, 1) == model.kv_bytes_per_token() + 1_000_000
    assert model.constant_bytes() == 1_000_000


@pytest.mark.parametrize(
    ("gpus", "latent", "copies"), [(1, 0, 1.0), (2, 0, 1.0), (8, 0, 4.0), (1, 576, 1.0), (8, 576, 8.0)]
)
def test_more_ranks_than_kv_heads_hold_copies_and_mla_always_does(gpus: int, latent: int, copies: float) -> None:
    assert Model(**{**DENSE, "latent_dim": latent}).shard_copies(gpus) == copies


def test_attention_work_is_four_q_d_per_pair_where_keys_and_values_are_alike() -> None:
    model = Model(**DENSE)
    assert attention_flops(model, 100, 50) == 4 * 4 * 8 * 64 * (100 * 50 + 100 * 100 / 2)
    assert Model(**{**DENSE, "qk_dim": 192, "v_dim": 128}).flops_per_pair() == 2 * 8 * (192 + 128)


def test_window_layers_count_capped_pairs() -> None:
    model = Model(**DENSE, layers_window=3, window_tokens=100)
    assert attention_flops(model, 10, 1_000) == model.flops_per_pair() * (4 * (10 * 1_000 + 50) + 3 * 10 * 100)


@given(TOKENS, TOKENS, st.integers(1, 3_000))
def test_pairs_of_a_window_are_the_sum_over_the_tokens(new: int, prefix: int, window: int) -> None:
    """The integral differs from the sum over tokens by half a pair per token at most."""
    brute = sum(min(at, window) for at in range(prefix, prefix + new))
    assert brute <= attention_pairs(new, prefix, window) <= brute + new / 2
    assert attention_pairs(new, prefix) == new * prefix + new**2 / 2


@given(TOKENS, TOKENS, TOKENS, st.one_of(st.none(), st.integers(1, 3_000)))
def test_chunks_of_a_prefill_have_the_pairs_of_the_whole(
    first: int, then: int, prefix: int, window: int | None
) -> None:
    whole = attention_pairs(first + then, prefix, window)
    assert attention_pairs(first, prefix, window) + attention_pairs(then, prefix + first, window) == pytest.approx(
        whole
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": " "}, "name is empty"),
        ({"layers_full": 0}, "at least one layer"),
        ({"layers_full": -1}, "layers_full must be from 0"),
        ({"layers_full": 10**9}, "layers_full must be from 0"),
        ({"layers_full": 1.5}, "layers_full must be a whole number"),
        ({"layers_full": True}, "layers_full must be a whole number"),
        ({"layers_window": 3}, "layers_window and window_tokens go together"),
        ({"window_tokens": 3}, "layers_window and window_tokens go together"),
        ({"layers_recurrent": 3}, "layers_recurrent and state_bytes go together"),
        ({"kv_heads": 64}, "were the two exchanged"),
        ({"value_bytes": 3}, "value_bytes must be one of"),
        ({"params_active": 2e9}, "params_active 2e\\+09 exceed params_total"),
        ({"params_active": float("nan")}, "params_active must be above 0"),
        ({"weight_bytes": float("inf")}, "weight_bytes must be above 0"),
        ({"weight_bytes": -1.0}, "weight_bytes must be above 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Model(**DENSE), **change)
