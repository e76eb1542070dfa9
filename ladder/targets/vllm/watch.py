"""What the ladder sees of a real engine between two steps: KV pages against a reference, admissions, preemptions.

Theory of operation
-------------------
The reference is the same engine, one request at a time, without connector and prefix cache. While it runs, every block
is copied as soon as all its tokens have been computed (`Reference.take`).

In every other pass `Watch.look` compares, for each running request, the blocks that its next step reads with the
reference of the same positions:

    all visible blocks     at its first step after an admission, and every `LOOKS_EVERY`-th step from then on
    a block                when it has become full

Blocks before a window are not looked at, nor is the last block before it is full: what a kernel keeps in the unused
part of a block is its own affair.

Floating-point sums depend on how a batch is put together, so equal tokens do not mean equal bits. `TOLERANCE` is the
difference up to which KV and log-probabilities count as equal. Two passes without any cache differ by up to 1e-5 (rung
1 measures it: A/A); a block of another prefix, or one shifted by a token, differs by about 1. Tokens must be equal.

Who holds: the reference its copies; the watch nothing of the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS, Answer, Ask, TinyEngine

TOLERANCE = 2e-4
LOOKS_EVERY = 8
FINDINGS_MAX = 20


@dataclass(slots=True)
class Distances:
    """The largest differences from the reference in a pass."""

    kv: float = 0.0
    logprob: float = 0.0

    def __str__(self) -> str:
        return f"KV {self.kv:.1e}, log-probability {self.logprob:.1e}"


class Reference:
    """Tokens, log-probabilities and KV of every request, computed alone."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self._blocks: dict[tuple[str, int, int], list[torch.Tensor]] = {}  # (request, group, index): of each layer

    def run(self, engine: TinyEngine, asks: Sequence[Ask]) -> None:
        """`engine` has neither connector nor prefix cache."""
        pages = engine.pages()
        for ask in asks:
            self.answers |= engine.serve([ask], lambda: self._take(engine, pages))

    def _take(self, engine: TinyEngine, pages: list[list[torch.Tensor]]) -> None:
        for request in engine.scheduler.running:
            full = request.num_computed_tokens // BLOCK_TOKENS
            for group, blocks in enumerate(engine.table(request.request_id)):
                for index in range(full - 1, -1, -1):
                    key = (request.request_id, group, index)
                    if key in self._blocks or not blocks[index]:
                        break
                    self._blocks[key] = [layer[blocks[index]].clone() for layer in pages[group]]

    def block(self, request_id: str, group: int, index: int) -> list[torch.Tensor] | None:
        """Of each layer; None where the request ended before anybody could look."""
        return self._blocks.get((request_id, group, index))


@dataclass(slots=True)
class Admission:
    """A request took blocks: `tokens` long by then, of which the engine's own cache and the connector gave some."""

    request_id: str
    tokens: int
    local_tokens: int
    external_tokens: int
    resumed: bool


@dataclass(slots=True)
class _Looked:
    """What of a running request was compared."""

    preemptions: int
    full: int = 0
    looks: int = 0


@dataclass(slots=True)
class Watch:
    """One pass. `admissions`: only with a connector."""

    engine: TinyEngine
    reference: Reference
    findings: list[str] = field(default_factory=list)
    distances: Distances = field(default_factory=Distances)
    admissions: list[Admission] = field(default_factory=list)
    preemptions: int = 0
    blocks_checked: int = 0
    loads_verified: int = 0
    _pages: list[list[torch.Tensor]] = field(default_factory=list)
    _looked: dict[str, _Looked] = field(default_factory=dict)
    _preempted: dict[str, int] = field(default_factory=dict)
    _loaded: dict[str, int] = field(default_factory=dict)  # admitted with a load, not seen running since
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pages = self.engine.pages()

    # ------------------------------------------------------------------ what the connector is asked

    def __enter__(self) -> Watch:
        """Listen to the scheduler's questions to its connector, whichever that is."""
        connector = self.engine.connector
        if connector is not None:
            self._listen(connector)
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _listen(self, connector: Any) -> None:
        matched, alloc = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        local: dict[str, int] = {}

        def ask(request: Any, num_computed_tokens: int) -> Any:
            local[request.request_id] = num_computed_tokens
            return matched(request, num_computed_tokens)

        def take(request: Any, blocks: Any, num_external_tokens: int) -> None:
            alloc(request, blocks, num_external_tokens)
            self._admitted(request, local.pop(request.request_id, None), num_external_tokens)

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = ask, take
        self._undo.append(lambda: connector.__dict__.pop("get_num_new_matched_tokens"))
        self._undo.append(lambda: connector.__dict__.pop("update_state_after_alloc"))

    def _admitted(self, request: Any, local: int | None, external: int) -> None:
        if local is None:
            return  # once more, after an asynchronous load
        self.admissions.append(
            Admission(request.request_id, request.num_tokens, local, external, request.num_preemptions > 0)
        )
        if external:
            self._loaded[request.request_id] = external
        self._looked.pop(request.request_id, None)

    # ------------------------------------------------------------------ between two steps

    def look(self) -> None:
        """Compare what the running requests see."""
        for request in self.engine.scheduler.requests.values():
            known = self._preempted.get(request.request_id, 0)
            self._preempted[request.request_id] = request.num_preemptions
            self.preemptions += request.num_preemptions - known
        for request in self.engine.scheduler.running:
            self._look_at(request)

    def _look_at(self, request: Any) -> None:
        looked = self._looked.get(request.request_id)
        if looked is None or looked.preemptions != request.num_preemptions:
            looked = self._looked[request.request_id] = _Looked(request.num_preemptions)
        full = request.num_computed_tokens // BLOCK_TOKENS
        everything = looked.looks % LOOKS_EVERY == 0
        for group, blocks in enumerate(self.engine.table(request.request_id)):
            first = self._first_visible(group, request.num_computed_tokens)
            start = first if everything else max(first, looked.full)
            for index in range(start, full):
                self._compare(request.request_id, group, index, blocks[index])
        looked.full, looked.looks = full, looked.looks + 1
        self.loads_verified += self._loaded.pop(request.request_id, 0) // BLOCK_TOKENS

    def _first_visible(self, group: int, computed: int) -> int:
        window = self.engine.windows[group]
        return 0 if window is None else max(0, computed - window + 1) // BLOCK_TOKENS

    def _compare(self, request_id: str, group: int, index: int, block: int) -> None:
        expected = self.reference.block(request_id, group, index)
        if expected is None:
            return
        self.blocks_checked += 1
        for layer, right in enumerate(expected):
            distance = _distance(self._pages[group][layer][block], right)
            self.distances.kv = max(self.distances.kv, distance)
            if not distance <= TOLERANCE:
                self._report(
                    f"[bytes] {request_id}, group {group}, layer {layer}: block {block}, which holds tokens "
                    f"{index * BLOCK_TOKENS} to {(index + 1) * BLOCK_TOKENS - 1}, is {distance:.2g} away from the "
                    f"reference (step {self.engine.steps})"
                )

    def compare(self, ask: Ask, answer: Answer | None) -> int:
        """How many tokens differ from the reference."""
        expected = self.reference.answers[ask.request_id]
        tokens = answer.tokens if answer is not None else ()
        wrong = [i for i, token in enumerate(expected.tokens) if i >= len(tokens) or tokens[i] != token]
        if wrong:
            self._report(f"[output] {ask.request_id} differs from the reference at token {wrong[0]}")
        elif answer is not None:
            far = max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True))
            self.distances.logprob = max(self.distances.logprob, far)
            if not far <= TOLERANCE:
                self._report(f"[output] {ask.request_id}: a log-probability is {far:.2g} away from the reference")
        return len(wrong)

    def _report(self, text: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """Not a number is as far as can be."""
    return float(torch.nan_to_num((found - right).abs().max(), nan=float("inf")))
