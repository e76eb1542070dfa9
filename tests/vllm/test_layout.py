"""From vLLM's tensors to pages: discovered, compared with the configuration's fingerprint, tested byte by byte."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import (
    AttentionConfig,
    DeviceConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.registry import AttentionBackendEnum
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

from kvcore.connectors.pages import ArrayPages, TensorPages
from kvcore.connectors.vllm import moving
from kvcore.connectors.vllm.layout import filled_by, fingerprints_of, layout_of, namespace_of, pages_of
from kvcore.connectors.vllm.moving import PAGED_CELL_BYTES, Moving, choose, compute_runtime, host_arrays
from kvcore.device.capability import capability
from kvcore.device.cpu_engine import CpuCopyEngine
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


def arrays_of(kv: dict[str, torch.Tensor]) -> list[Any]:
    arrays = host_arrays(pages_of(kv_config(), kv, "cpu"))
    assert arrays is not None
    return arrays


def test_pages_are_the_engines_own_memory_however_its_layers_lie() -> None:
    inside, apart = words(40, 3, BLOCK_TOKENS), words(3, 40, BLOCK_TOKENS).transpose(0, 1)
    for memory in (inside, apart):
        (pages,) = arrays_of(tensors(memory))
        assert pages.shape == (40, 3, PAGE)
        assert bytes(pages[7, 2]) == bytes(memory[7, 2].numpy())
        pages[7, 2] = 255
        assert bool((memory[7, 2] == -1).all())
    assert arrays_of(tensors(inside))[0][5].flags.c_contiguous
    assert not arrays_of(tensors(apart))[0][5].flags.c_contiguous


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (words(41, 3, BLOCK_TOKENS), "num_blocks would be 41, not 40"),
        (words(80, 3, BLOCK_TOKENS // 2), "num_blocks would be 80, not 40"),
        (words(40, 3, BLOCK_TOKENS + 1), "named for other bytes"),
        (words(40, 3, 2 * BLOCK_TOKENS)[..., ::2], "no single piece of memory"),
        (words(40, 5, BLOCK_TOKENS)[:, [0, 1, 2]].expand(40, 3, BLOCK_TOKENS), ""),
    ],
)
def test_tensors_that_are_not_what_was_promised_are_refused(memory: torch.Tensor, text: str) -> None:
    if not text:
        assert pages_of(kv_config(), tensors(memory), "cpu"), "a copy of three layers is as good as any"
        return
    with pytest.raises(ConfigError, match=text):
        pages_of(kv_config(), tensors(memory), "cpu")


def test_layers_that_are_not_equally_far_apart_are_copied_page_by_page() -> None:
    uneven = tensors(words(40, 5, BLOCK_TOKENS))
    memory = words(40, 5, BLOCK_TOKENS)
    for layer, name in zip((0, 1, 3), uneven, strict=True):
        uneven[name] = memory[:, layer].unsqueeze(1).unsqueeze(-1)
    pages = pages_of(kv_config(), uneven, "cpu")
    assert host_arrays(pages) is None
    cell = bytearray(2 * pages.block_bytes(0))
    carry_out(lambda loop: choose(loop, pages, 1, None), lambda taken: taken.out_of(0, (7, 2), memoryview(cell)))
    assert bytes(cell) == b"".join(bytes(memory[block, layer].numpy()) for block in (7, 2) for layer in (0, 1, 3))


def carry_out(chosen_on: Callable[[Any], Moving], copies: Callable[[Any], list[Any]]) -> None:
    async def run() -> None:
        chosen = chosen_on(asyncio.get_running_loop())
        pages = chosen.pages if isinstance(chosen.pages, TensorPages) else ArrayPages(chosen.pages)
        ticket = chosen.device.submit(copies(pages), stream="copy")
        await ticket.wait()
        assert ticket.error is None
        chosen.device.close()

    asyncio.run(run())


@pytest.mark.parametrize("apart", [False, True], ids=["blocks of all layers", "layers apart"])
def test_large_cells_are_paged_and_small_ones_are_not_and_nobody_can_tell_by_the_bytes(apart: bool) -> None:
    memory = words(3, 40, BLOCK_TOKENS).transpose(0, 1) if apart else words(40, 3, BLOCK_TOKENS)
    pages, blocks, found = pages_of(kv_config(), tensors(memory), "cpu"), (9, 4), []
    before = memory[list(blocks)].clone()
    for cell_bytes in (PAGED_CELL_BYTES - 1, PAGED_CELL_BYTES):
        cell, kinds = bytearray(len(blocks) * 3 * PAGE), dict[str, None]()

        def chosen_on(loop: Any, cell_bytes: int = cell_bytes, kinds: dict[str, None] = kinds) -> Moving:
            chosen = choose(loop, pages, cell_bytes, None)
            kinds[type(chosen.device).__name__] = None
            return chosen

        carry_out(chosen_on, lambda taken, cell=cell: taken.out_of(0, blocks, memoryview(cell)))  # type: ignore[misc]
        memory[list(blocks)] = 0
        carry_out(chosen_on, lambda taken, cell=cell: taken.into(0, blocks, memoryview(cell)))  # type: ignore[misc]
        assert torch.equal(memory[list(blocks)], before)
        found.append((bytes(cell), *kinds))
    assert found[0][0] == found[1][0]
    compiled = not capability().native
    assert [kind for _, kind in found] == ["ThreadCopyEngine", "CpuCopyEngine" if compiled else "ThreadCopyEngine"]


def test_pages_on_a_device_that_nobody_here_can_reach_are_refused() -> None:
    memory = words(40, 3, BLOCK_TOKENS)
    pages = pages_of(kv_config(), tensors(memory.to("meta")), "meta")
    with pytest.raises(ConfigError, match="the pages lie on meta"):
        compute_runtime(pages)
    assert compute_runtime(pages_of(kv_config(), tensors(memory), "cpu")) is None


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
            assert len(pages_of(config, kv, "cpu")) == 1
        else:
            with pytest.raises(ConfigError, match="lie in the order"):
                pages_of(config, kv, "cpu")


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


def named(model: Any = None, speculative: Any = None, **changes: Any) -> bytes:
    """The namespace of an engine of `model`, with attributes of its configuration, or of the model's own, changed."""
    config = make_config(CASE, {})
    config.speculative_config = speculative
    config.model_config = copy.copy(config.model_config if model is None else model)
    config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    for name, value in changes.items():
        own = hasattr(config.model_config, name)
        setattr(config.model_config if own else config.model_config.hf_config, name, value)
    return namespace_of(config, kv_config(), layout_of(kv_config())).digest


def test_whatever_is_told_of_a_model_changes_the_namespace_and_nothing_else_does() -> None:
    """S04: positions stretched by an override, rounded weights. What a model writes into its own configuration while it
    is loaded does not: that happens in the workers alone."""
    plain = named()
    assert plain == named(transformers_version="0") == named(tie_word_embeddings=True) == named(hf_overrides={})
    stretched = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    others = [named(hf_overrides=each) for each in (stretched, {"rms_norm_eps": 1e-6}, copy.deepcopy)]
    others += [named(hf_config_path="elsewhere"), named(revision="1")]
    others += [named(quantization="fp8"), named(quantization="awq"), named(quantization_config={"linear": "int8"})]
    others += [named(multimodal_config=MultiModalConfig(mm_encoder_attn_dtype="fp8"))]
    others += [named(multimodal_config=MultiModalConfig(video_pruning_rate=rate)) for rate in (0.25, 0.5)]
    assert len({plain, *others}) == 12
    assert plain == named(multimodal_config=MultiModalConfig())


def model_of(directory: Path, **changes: Any) -> ModelConfig:
    """vLLM's own configuration of a tiny model."""
    directory.mkdir()
    tiny = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(tiny | changes))
    return ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=512)


def test_how_long_a_request_may_be_changes_the_keys_where_it_changes_the_kv(tmp_path: Path) -> None:
    """S31: with LongRoPE, and in Llama 4, a longer limit makes other KV of every prompt, and only the limit says so."""
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = model_of(
        tmp_path / "phi",
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        max_position_embeddings=1024,
        original_max_position_embeddings=512,
        rope_scaling=factors,
    )
    assert named(phi, max_model_len=256) == named(phi, max_model_len=512)
    assert len({named(phi, max_model_len=reach) for reach in (512, 513, 1024)}) == 2
    fitted = {named(phi, max_model_len=reach, original_max_model_len=-1) for reach in (300, 600)}
    assert len(fitted) == 1, "what was fitted to the memory was so after the model was made"
    arch = copy.copy(phi.model_arch_config)
    arch.architectures = ["Llama4ForCausalLM"]
    llama4 = partial(named, model_of(tmp_path / "llama"), model_arch_config=arch)
    assert len({llama4(max_model_len=reach) for reach in (1024, 32768, 32769, 1 << 20)}) == 2
    assert llama4() != llama4(override_generation_config={"attn_temperature_tuning": True})
    assert named(max_model_len=512) == named(max_model_len=1 << 20), "others share what they have stored"


def test_another_drafting_model_makes_other_keys_where_its_kv_is_stored_as_well(tmp_path: Path) -> None:
    """S32: its layers lie in the same cells, and nothing but its name tells two of one shape apart."""
    target = model_of(tmp_path / "target")

    def drafting(method: str, drafter: ModelConfig) -> bytes:
        speculative = SpeculativeConfig(
            method=method,
            model=drafter.model,
            revision=drafter.revision,
            num_speculative_tokens=2,
            target_model_config=target,
            target_parallel_config=ParallelConfig(),
        )
        return named(target, speculative)

    first, second = model_of(tmp_path / "first"), model_of(tmp_path / "second")
    assert drafting("draft_model", first) == drafting("draft_model", first)
    assert len({named(target), drafting("draft_model", first), drafting("draft_model", second)}) == 3
    assert named(target) == drafting("ngram", target), "it keeps no KV"


def test_blocks_on_a_device_are_named_by_the_backends_that_were_asked_for() -> None:
    """The order inside a block is the backend's; on the CPU names stay what they were."""

    def named(device: str, **attention: Any) -> str:
        config = make_config(CASE, {})
        config.device_config = DeviceConfig("cpu")
        config.device_config.device_type = device
        config.attention_config = AttentionConfig(**attention)
        return filled_by(config)

    flash, triton = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN
    assert named("cpu", backend=flash) == "cpu"
    names = [named("cuda"), named("cuda", backend=flash), named("cuda", backend=triton)]
    names.append(named("cuda", backend=triton, backend_per_kind={"sliding_window": flash}))
    assert names[0] == "cuda"
    assert len({fingerprints_of(kv_config(), name)[0] for name in names}) == len(names)


def test_pages_that_lie_elsewhere_than_the_configuration_says_are_refused() -> None:
    memory = words(40, 3, BLOCK_TOKENS)
    with pytest.raises(ConfigError, match="lie on cpu, the configuration promised cuda"):
        pages_of(kv_config(), tensors(memory), "cuda")


class LayersApart(FakeRunner):
    """A runner whose layers lie one behind the other, as the real engine on CPU has them."""

    def __init__(self, case: Case, connector: Any, findings: list[Finding]) -> None:
        super().__init__(case, connector, findings)
        memory = torch.zeros(case.layers, case.num_blocks, BLOCK_TOKENS, dtype=torch.int64).transpose(0, 1)
        self.pages = memory.numpy().view(np.uint64)
        self.layers = tensors(memory)
        connector.register_kv_caches(self.layers)


@pytest.mark.parametrize("paged_from", [1, PAGED_CELL_BYTES], ids=["paged", "by numpy"])
def test_blocks_whose_layers_lie_apart_are_stored_and_loaded(paged_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "PAGED_CELL_BYTES", paged_from)
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
    assert isinstance(worker._side.mover.device, CpuCopyEngine) == (paged_from == 1 and not capability().native)
    scheduler.connector.shutdown()
    worker.shutdown()
