"""From vLLM's tensors to pages: discovered, compared with the configuration's fingerprint, tested byte by byte."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from kvcore.connectors.vllm.layout import fingerprints_of, layout_of, namespace_of, pages_of
from kvcore.errors import ConfigError
from kvcore.ladder.targets.vllm_scheduler.case import BLOCK_TOKENS, Case, CaseRequest
from kvcore.ladder.targets.vllm_scheduler.engine import (
    layer_names,
    make_config,
    make_kv_config,
    make_request,
    make_scheduler,
)
from kvcore.ladder.targets.vllm_scheduler.fake_runner import FakeRunner, Finding
from kvcore.ladder.targets.vllm_scheduler.tokens import reference

CASE = Case(
    seed=0,
    requests=tuple(CaseRequest(f"r{i}", tuple(range(i + 1, i + 70)), 12) for i in range(6)),
    num_blocks=40,
    layers=3,
)
PAGE = BLOCK_TOKENS * 8
STEPS_MAX = 200_000


def kv_config(layout: str | None = None, **changes: Any) -> Any:
    config = copy.deepcopy(make_kv_config(CASE))
    config.kv_cache_layout = layout
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tensors(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """`memory`: [blocks, layers, tokens] in any order of strides; as vLLM names them, [blocks, 1, tokens, content]."""
    (names,) = layer_names(CASE)
    return {name: memory[:, layer].unsqueeze(1).unsqueeze(-1) for layer, name in enumerate(names)}


def words(*sizes: int) -> torch.Tensor:
    return torch.arange(int(np.prod(sizes)), dtype=torch.int64).view(*sizes)


def test_pages_are_the_engines_own_memory_however_its_layers_lie() -> None:
    inside, apart = words(40, 3, BLOCK_TOKENS), words(3, 40, BLOCK_TOKENS).transpose(0, 1)
    for memory in (inside, apart):
        (pages,) = pages_of(kv_config(), tensors(memory))
        assert pages.shape == (40, 3, PAGE)
        assert bytes(pages[7, 2]) == bytes(memory[7, 2].numpy())
        pages[7, 2] = 255
        assert bool((memory[7, 2] == -1).all())
    assert pages_of(kv_config(), tensors(inside))[0][5].flags.c_contiguous
    assert not pages_of(kv_config(), tensors(apart))[0][5].flags.c_contiguous


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (words(41, 3, BLOCK_TOKENS), "num_blocks would be 41, not 40"),
        (words(80, 3, BLOCK_TOKENS // 2), "num_blocks would be 80, not 40"),
        (words(40, 3, BLOCK_TOKENS + 1), "the configuration promised"),
        (words(40, 3, 2 * BLOCK_TOKENS)[..., ::2], "no single piece of memory"),
        (words(40, 5, BLOCK_TOKENS)[:, [0, 1, 2]].expand(40, 3, BLOCK_TOKENS), ""),
    ],
)
def test_tensors_that_are_not_what_was_promised_are_refused(memory: torch.Tensor, text: str) -> None:
    if not text:
        assert pages_of(kv_config(), tensors(memory)), "a copy of three layers is as good as any"
        return
    with pytest.raises(ConfigError, match=text):
        pages_of(kv_config(), tensors(memory))


def test_layers_that_are_not_equally_far_apart_are_refused() -> None:
    uneven = tensors(words(40, 5, BLOCK_TOKENS))
    memory = words(40, 5, BLOCK_TOKENS)
    for layer, name in zip((0, 1, 3), uneven, strict=True):
        uneven[name] = memory[:, layer].unsqueeze(1).unsqueeze(-1)
    with pytest.raises(ConfigError, match="equally far apart"):
        pages_of(kv_config(), uneven)


def attention(kind: type, **more: Any) -> Any:
    return kind(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (MambaSpec(block_size=512, shapes=((2, 3),), dtypes=(torch.float32,)), "MambaSpec.*recurrent"),
        (attention(ChunkedLocalAttentionSpec, attention_chunk_size=64), "ChunkedLocalAttentionSpec"),
        # Derived from full attention, and yet blocks between the prompt and the last tokens are given back.
        (attention(RSWASpec, rswa_window=64), "RSWASpec"),
        (attention(SinkFullAttentionSpec, sink_len=4), "SinkFullAttentionSpec"),
        (attention(FullAttentionSpec, tokens_per_state=4), "one state for 4 tokens"),
        (attention(SlidingWindowSpec, sliding_window=64, extra_retained_tokens=1), "extra retained"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_groups_whose_blocks_follow_another_rule_are_refused_by_name(spec: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"layers \['here'\].*{text}"):
        layout_of(KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["here"], spec)]))


def two_heads() -> Any:
    """A configuration of two heads, so that there is an order."""
    config = kv_config()
    (group,) = config.kv_cache_groups
    group.kv_cache_spec = replace(group.kv_cache_spec, num_kv_heads=2)
    return config


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_the_order_that_the_configuration_names_must_be_the_one_in_memory(order: str) -> None:
    config = two_heads()
    memory = words(3, 40, 2 * BLOCK_TOKENS)
    shapes = {
        "LBHNC": memory.view(3, 40, 2, BLOCK_TOKENS),
        "LBNHC": memory.view(3, 40, BLOCK_TOKENS, 2).transpose(2, 3),
    }
    (names,) = layer_names(CASE)
    kv = {name: layer.unsqueeze(-1) for name, layer in zip(names, shapes[order], strict=True)}
    for named in ("LBHNC", "LBNHC"):
        config.kv_cache_layout = named
        if named == order:
            assert len(pages_of(config, kv)) == 1
        else:
            with pytest.raises(ConfigError, match="lie in the order"):
                pages_of(config, kv)


def test_the_namespace_carries_what_the_bytes_of_a_chunk_are() -> None:
    config = make_config(CASE, {})
    names = {}
    for label, each in {
        "plain": kv_config(),
        "heads first": kv_config("LBHNC"),
        "heads first, blocks outside": kv_config("BLHNC"),
        "tokens first": kv_config("LBNHC"),
        "two heads": two_heads(),
        "more blocks": kv_config(num_blocks=50),
    }.items():
        names[label] = namespace_of(config, each, layout_of(each)).digest
    assert names["plain"] == names["more blocks"]
    assert names["heads first"] == names["heads first, blocks outside"]
    assert len(set(names.values())) == 4
    assert fingerprints_of(kv_config(), "cpu") != fingerprints_of(kv_config(), "cuda"), "another kernel's blocks"


class LayersApart(FakeRunner):
    """A runner whose layers lie one behind the other, as the real engine on CPU has them."""

    def __init__(self, case: Case, connector: Any, findings: list[Finding]) -> None:
        super().__init__(case, connector, findings)
        memory = torch.zeros(case.layers, case.num_blocks, BLOCK_TOKENS, dtype=torch.int64).transpose(0, 1)
        self.pages = memory.numpy().view(np.uint64)
        self.layers = tensors(memory)
        connector.register_kv_caches(self.layers)


def test_blocks_whose_layers_lie_apart_are_stored_and_loaded() -> None:
    transfer = {
        "kv_connector": "KvcoreConnector",
        "kv_connector_module_path": "kvcore.connectors.vllm",
        "kv_connector_extra_config": {"l1_bytes": 1 << 22, "chunk_tokens": 16},
    }
    config, kv = make_config(CASE, transfer), kv_config()
    scheduler = make_scheduler(CASE, config, kv)
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
    findings: list[Finding] = []
    runner = LayersApart(CASE, worker, findings)
    for number in range(2):
        got: dict[str, list[int]] = {}
        for request in CASE.requests:
            scheduler.add_request(make_request(replace(request, request_id=f"{request.request_id}.{number}"), 0.0))
            got[f"{request.request_id}.{number}"] = []
        for _ in range(STEPS_MAX):
            if not scheduler.has_requests():
                break
            output = scheduler.schedule()
            for outputs in scheduler.update_from_output(output, runner.execute(output)).values():
                for each in outputs.outputs:
                    got[each.request_id].extend(each.new_token_ids)
        for request in CASE.requests:
            assert got[f"{request.request_id}.{number}"] == reference(request.prompt, request.output_tokens)
        scheduler.reset_prefix_cache()
    assert not findings
    assert worker._side.worker.statistics().loads >= len(CASE.requests)
    assert worker._side.worker.statistics().loads_failed == 0
    scheduler.connector.shutdown()
    worker.shutdown()
