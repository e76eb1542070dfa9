"""The fingerprint model as vLLM runs it: a model class without weights, over vLLM's own `Attention` layers.

Of a layer, everything but the sum is vLLM's: its cache spec and group, its pages, the slot mapping and the kernel that
writes K and V by it, block tables and metadata, and the connector's hooks around it (`wait_for_layer_load` before,
`save_kv_layer` after). `FingerprintImpl` stands where the attention kernel is: it reads every slot that the new tokens
may see from the pages, shows them to a witness if there is one, and gives the sum back as floats that hold it exactly.

Between layers the model's state of a token is such floats too; logits are 1 for the next token and 0 for all others.

Who holds: the engine its pages; an impl its witness, until somebody sets another one (`fingerprint_witness`).
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return"
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvcore.ladder.targets.vllm.fingerprint import (
    HEAD,
    VOCABULARY,
    WORD_FLOATS,
    Bits,
    TokenFingerprints,
    from_bits,
    model_of,
    to_bits,
)
from kvcore.ladder.targets.vllm.fingerprint_pages import PageOrder, Visible
from kvcore.sim.model import U64


def _bits(floats: torch.Tensor) -> Bits:
    return floats.numpy().view(np.uint32)


def _tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32))


def _halves(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of [tokens, ROW] slots."""
    return slots[:, :HEAD].contiguous(), slots[:, HEAD:].contiguous()


def _row(words: U64) -> torch.Tensor:
    """[tokens] words as [tokens, HEAD] floats; the rest of a row is 0."""
    row = torch.zeros(len(words), HEAD)
    row[:, :WORD_FLOATS] = _tensor(to_bits(words[:, None]))
    return row


def _words(row: torch.Tensor) -> U64:
    """The inverse of `_row`."""
    return from_bits(np.ascontiguousarray(_bits(row)[:, :WORD_FLOATS]))[:, 0]


class FingerprintImpl(CPUAttentionBackendImpl):
    """In the place of the attention kernel. Its `do_kv_cache_update`, which writes, is vLLM's."""

    def __init__(self, *arguments: Any, index: int, model: TokenFingerprints, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.index = index
        self.window: int | None = self.sliding_window if self.sliding_window > 0 else None
        self.witness: Any = None
        self._weights = model.weights
        self._order: PageOrder | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:  # warming up, without pages
            return output
        if self._order is None:
            self._order = self._ask_order(layer, kv_cache)
        visible = Visible.of(attn_metadata, self.window, kv_cache.shape[2])
        slots = self._order.read(_bits(kv_cache.view(len(kv_cache), -1)), visible.blocks)
        if self.witness is not None:
            self.witness.look(self.index, visible, slots)
        sums = visible.sums(from_bits(slots), self._weights)
        output[: len(sums)] = _row(sums).unsqueeze(1)
        return output

    def _ask_order(self, layer: Any, kv_cache: torch.Tensor) -> PageOrder:
        block_tokens = kv_cache.shape[2]

        def write(rows: Any) -> Any:
            page = torch.zeros_like(kv_cache[:1])
            key, value = (half.unsqueeze(1) for half in _halves(torch.from_numpy(rows)))
            self.do_kv_cache_update(layer, key, value, page, torch.arange(block_tokens))
            return page.reshape(-1).numpy()

        return PageOrder(block_tokens, write)


class FingerprintBackend(CPUAttentionBackend):
    """vLLM's CPU backend: its layouts, its metadata, its name. Only the impl is ours."""

    @staticmethod
    def get_impl_cls() -> type[FingerprintImpl]:
        return FingerprintImpl


class FingerprintForCausalLM(nn.Module):
    """See the module text. `config.json` is `fingerprint.config_of`'s; there is nothing to load."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.fingerprints = model_of(vllm_config.model_config.hf_config)
        self.layers = nn.ModuleList(
            Attention(
                num_heads=1,
                head_size=HEAD,
                scale=1.0,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=layer.window_tokens or None,
                prefix=f"model.layers.{layer.index}.attn",
                attn_backend=FingerprintBackend,
                index=layer.index,
                model=self.fingerprints,
            )
            for layer in self.fingerprints.layers
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Part of vLLM's interface; only models that take embeddings are asked."""
        return _row(input_ids.numpy().astype(np.uint64))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        if get_forward_context().attn_metadata is None:
            return torch.zeros(len(input_ids), HEAD)
        x = self.fingerprints.embed(input_ids.numpy().astype(np.uint32), positions.numpy())
        for index, layer in enumerate(self.layers):
            key, value = _halves(_tensor(to_bits(self.fingerprints.kv(index, 0, x))))
            sums = layer(torch.zeros(len(x), HEAD), key, value)
            x = self.fingerprints.combine(index, x, _words(sums))
        return _row(x)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = self.fingerprints.next_tokens(_words(hidden_states))
        logits = torch.zeros(len(tokens), VOCABULARY)
        logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 1.0
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """There are none."""
        return {name for name, _ in weights}
