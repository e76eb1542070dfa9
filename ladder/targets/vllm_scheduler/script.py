"""A connector that follows a script, the same one in front of both schedulers. It moves no bytes.

Every answer is a function of the seed, the request and how often it has been asked since it last lost its blocks; so
two schedulers that behave alike get the same answers, and the first difference is seen where it happens.
"""

# mypy: disable-error-code="import-not-found, misc"
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from kvcore.connectors.views import NULL_BLOCK, BlockTable, Finished, RequestView, StepView
from kvcore.ladder.targets.vllm_scheduler.case import BLOCK_TOKENS

Question = tuple[str, int, int | None]


@dataclass(slots=True)
class Script:
    """One per scheduler. `questions` and `preempted` are taken by the comparison after each step."""

    seed: int
    load_async: bool
    groups: int
    fail_rate: float
    hold_rate: float
    step: int = 0
    questions: list[Question] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)  # since the request last lost its blocks
    failures: dict[str, int] = field(default_factory=dict)
    loading: dict[str, int] = field(default_factory=dict)  # request -> the step that reports its load
    bad: dict[str, tuple[int, ...]] = field(default_factory=dict)  # blocks of a load that will fail
    holding: dict[str, int] = field(default_factory=dict)  # ended request -> the step that gives back its blocks

    def _roll(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed}/{key}")

    def answer(self, request_id: str, tokens: int, local: int) -> int | None:
        asked = self.asked[request_id] = self.asked.get(request_id, 0) + 1
        rng = self._roll(request_id, tokens)
        external: int | None = None
        if asked > rng.choice([0, 0, 1, 2]):
            whole = rng.randint(0, (tokens - 1) // BLOCK_TOKENS) if self.failures.get(request_id, 0) < 2 else 0
            external = max(0, whole * BLOCK_TOKENS - local)
        self.questions.append((request_id, local, external))
        return external

    def allocated(self, request_id: str, table: BlockTable, local: int, external: int) -> None:
        self.asked.pop(request_id, None)
        if not external:
            return
        rng = self._roll(request_id, local, external, "load")
        if self.load_async:
            self.loading[request_id] = self.step + rng.randint(0, 4)
        if rng.random() < self.fail_rate:
            first = rng.randrange(local // BLOCK_TOKENS, (local + external) // BLOCK_TOKENS)
            self.bad[request_id] = tuple(block for block in table[0][first : first + 2] if block != NULL_BLOCK)

    def lost(self, request_id: str) -> None:
        self.asked.pop(request_id, None)

    def ended(self, request_id: str, held: bool) -> bool:
        self.lost(request_id)
        rng = self._roll(request_id, "hold")
        if held and request_id not in self.loading and rng.random() < self.hold_rate:
            self.holding[request_id] = self.step + rng.randint(1, 4)
            return True
        return False

    def reports(self) -> tuple[Finished, frozenset[int]]:
        """What the workers say after this step."""
        received = sorted(name for name, step in self.loading.items() if step <= self.step)
        sent = sorted(name for name, step in self.holding.items() if step <= self.step)
        errors: set[int] = set()
        failed = []
        for name in received if self.load_async else list(self.bad):
            self.loading.pop(name, None)
            if name in self.bad:
                errors.update(self.bad.pop(name))
                self.failures[name] = self.failures.get(name, 0) + 1
                failed.append(name)
        for name in sent:
            del self.holding[name]
        self.step += 1
        several = self.groups > 1
        finished = Finished(frozenset(sent), frozenset(received), frozenset(failed if several else ()))
        return finished, frozenset(() if several else errors)


class ScriptSide:
    """In front of the simulated scheduler."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._local: dict[str, int] = {}

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        self._local[request.request_id] = local_tokens
        answer = self._script.answer(request.request_id, len(request.tokens), local_tokens)
        return answer, bool(answer) and self._script.load_async

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        self._script.allocated(request.request_id, blocks, self._local[request.request_id], external_tokens)

    def build_meta(self, step: StepView) -> None:
        return None

    def preempted(self, request_id: str) -> None:
        self._script.lost(request_id)

    def finished(self, request: RequestView, blocks: BlockTable) -> bool:
        return self._script.ended(request.request_id, any(blocks))

    def update_output(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        return None


class ScriptConnector(KVConnectorBase_V1, SupportsHMA):
    """In front of vLLM's scheduler; only the scheduler role exists."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._script: Script = self._kv_transfer_config.kv_connector_extra_config["script"]
        self._local: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._local[request.request_id] = num_computed_tokens
        answer = self._script.answer(request.request_id, request.num_tokens, num_computed_tokens)
        return answer, bool(answer) and self._script.load_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        table = blocks.get_block_ids()
        self._script.allocated(request.request_id, table, self._local[request.request_id], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for name in scheduler_output.preempted_req_ids or ():
            self._script.lost(name)
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._script.ended(request.request_id, any(block_ids)), None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise AssertionError("no worker runs")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise AssertionError("no worker runs")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise AssertionError("no worker runs")

    def wait_for_save(self) -> None:
        raise AssertionError("no worker runs")
