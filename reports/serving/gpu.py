"""How long the engine's steps take: prompts in chunks beside decoding sequences, and decode steps many at a time.

Theory of operation
-------------------
The terms are those of the cost model (reports/prefill.py), put together for a batch:

    compute  = sum over prompt parts (token_s * n + pair_s * n (p + n/2)) + decode (B tokens, their contexts)
    memory   = (weights that so many tokens touch + KV of prefixes and contexts) / HBM
    step     = step_s + max(compute, memory) / (1 - sm_share while a copy kernel runs)

With one prompt and nothing decoding that is exactly `prefill_s`, and with equal contexts and no prompt `decode_step_s`.

While the batch does not change, step i differs from step 0 by i more tokens of context per sequence: compute and memory
are both straight lines in i, so k steps are two arithmetic series, up to the step where the lines cross and from there
on. `decode_s(k)` is that sum: a thousand steps cost what one costs. A sequence ends at a known step (its first plus its
output), so ends are a heap of step numbers.

Windows: a sequence counts with min(prompt, window) tokens in window layers from its first decode step on; it grows to
its full window within `window_tokens` steps, which is left out.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Protocol

from kvcore.reports.model import Model, attention_pairs
from kvcore.reports.prefill import prefill_terms, weights_touched_bytes
from kvcore.reports.serving.setting import Setting


class Sequence(Protocol):
    """What a batch needs to know of a decoding request."""

    prompt_tokens: int
    output_tokens: int


class Part:
    """New tokens of one prompt in one step, behind `prefix` tokens that are there."""

    __slots__ = ("pairs", "prefix", "tokens")

    def __init__(self, tokens: int, prefix: int) -> None:
        self.tokens = tokens
        self.prefix = prefix
        self.pairs = tokens * (prefix + tokens / 2)


class Batch:
    """The decoding sequences of one worker, and the time of its steps."""

    def __init__(self, setting: Setting) -> None:
        model, host = setting.model, setting.host
        terms = prefill_terms(model, host)
        memory = terms.memory
        assert memory is not None
        self._model: Model = model
        self._fixed_s = terms.fixed_s
        self._token_s = terms.token_s
        self._pair_s = terms.pair_s
        self._window_pair_s = terms.window_pair_s
        self._window = model.window_tokens
        self._kv_s = model.kv_bytes_per_token() * memory.copies / memory.bytes_per_s
        self._window_kv_s = model.layers_window * model.layer_bytes_per_token() * memory.copies / memory.bytes_per_s
        self._state_s = model.state_bytes * memory.copies / memory.bytes_per_s
        self._bytes_per_s = memory.bytes_per_s
        self._weights: dict[int, float] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        self._serial = 0
        self._tokens = 0  # of context, all sequences together
        self._window_tokens = 0
        self.steps = 0

    def __len__(self) -> int:
        return len(self._ends)

    def join(self, sequence: Sequence) -> None:
        """Its prompt is computed and its first token is out; the rest of its output is decoded."""
        assert sequence.output_tokens > 1
        self._serial += 1
        heappush(self._ends, (self.steps + sequence.output_tokens - 1, self._serial, sequence))
        self._tokens += sequence.prompt_tokens
        self._window_tokens += min(sequence.prompt_tokens, self._window)

    def advance(self, steps: int) -> list[Sequence]:
        """So many steps have run; the sequences that have ended, none of them earlier than now."""
        self.steps += steps
        self._tokens += steps * len(self._ends)
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            end, _, sequence = heappop(self._ends)
            assert end == self.steps, "a sequence ended inside a run of steps"
            self._tokens -= sequence.prompt_tokens + sequence.output_tokens - 1
            self._window_tokens -= min(sequence.prompt_tokens, self._window)
            ended.append(sequence)
        assert self._tokens >= 0
        return ended

    @property
    def steps_to_end(self) -> int:
        """Steps until the first sequence ends."""
        return self._ends[0][0] - self.steps

    def mixed_s(self, parts: list[Part], sm_share: float = 0.0) -> float:
        """One step that computes these parts beside the decoding sequences."""
        compute, _, memory, _ = self._lines()
        tokens = len(self._ends)
        for part in parts:
            tokens += part.tokens
            compute += self._token_s * part.tokens + self._pair_s * part.pairs
            memory += self._kv_s * part.prefix
            if self._window:
                compute += self._window_pair_s * attention_pairs(part.tokens, part.prefix, self._window)
                memory += self._window_kv_s * min(part.prefix, self._window)
            if part.prefix:
                memory += self._state_s
        return self._fixed_s + max(compute, memory + self._weights_s(tokens)) / (1 - sm_share)

    def decode_s(self, steps: int, sm_share: float = 0.0) -> float:
        """So many decode steps of the batch as it is."""
        compute, more_compute, memory, more_memory = self._lines()
        memory += self._weights_s(len(self._ends))
        first, more, other, other_more = compute, more_compute, memory, more_memory
        if memory > compute:
            first, more, other, other_more = memory, more_memory, compute, more_compute
        before = steps  # steps in which `first` is the greater one
        if other_more > more:
            before = min(steps, math.ceil((first - other) / (other_more - more)))
        total = _series(first, more, 0, before) + _series(other, other_more, before, steps)
        return steps * self._fixed_s + total / (1 - sm_share)

    def _lines(self) -> tuple[float, float, float, float]:
        """Of the next decode step: compute, its growth per step, KV reads, their growth."""
        count = len(self._ends)
        if not count:
            return 0.0, 0.0, 0.0, 0.0
        compute = count * self._token_s + self._pair_s * (self._tokens + count / 2)
        memory = self._kv_s * self._tokens + self._state_s * count
        if self._window:
            compute += self._window_pair_s * self._window_tokens
            memory += self._window_kv_s * self._window_tokens
        return compute, self._pair_s * count, memory, self._kv_s * count

    def _weights_s(self, tokens: int) -> float:
        """Reads of the weights that so many tokens touch."""
        known = self._weights.get(tokens)
        if known is None:
            known = self._weights[tokens] = weights_touched_bytes(self._model, tokens) / self._bytes_per_s
        return known


def _series(first: float, more: float, begin: int, end: int) -> float:
    """Sum of first + more * i for begin <= i < end."""
    return (end - begin) * first + more * (end * (end - 1) - begin * (begin - 1)) / 2
