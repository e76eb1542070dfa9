"""`FakeRunner`: a model runner whose slots hold rolling hashes. It knows what vLLM's runners know, and checks slots.

Per step, in the order of vLLM's runners: `handle_preemptions`, states updated from the output, metadata bound,
synchronous loads started, layers {wait, check, write, save}, other loads started, `wait_for_save`, reports.

The two shapes of an output:

    V1   a resumed request is in `scheduled_cached_reqs.resumed_req_ids`; its new block ids replace the table
    V2   a resumed request is back in `scheduled_new_reqs`, with `prefill_token_ids`

A check happens when all loads of the step have ended and nothing of the step is written. A slot that is wrong is a
finding, unless the connector says in this very step that one of the request's blocks was not loaded; what is computed
on such ground is garbage, and is written as garbage.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvcore.connectors.views import NULL_BLOCK
from kvcore.ladder.targets.vllm_scheduler.case import BLOCK_TOKENS, Case
from kvcore.ladder.targets.vllm_scheduler.engine import layer_names
from kvcore.ladder.targets.vllm_scheduler.tokens import GARBAGE, Prefixes, Words, place_key


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must not be. `kind` is what shrinking holds fast."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True)
class _State:
    """One request as the runner has it."""

    prefixes: Prefixes
    prompt_tokens: int
    tables: list[list[int]]
    computed: int


@dataclass(slots=True)
class RunnerCounts:
    steps: int = 0
    slots_checked: int = 0
    resumed_v1: int = 0
    resumed_v2: int = 0
    null_blocks: int = 0
    tainted: int = 0


class FakeRunner:
    """`pages`: [blocks, layers, block tokens] words; every group's pages lie in the same blocks."""

    def __init__(self, case: Case, connector: Any, findings: list[Finding]) -> None:
        self._case = case
        self._connector = connector
        self._findings = findings
        self.counts = RunnerCounts()
        self.pages: Words = np.zeros((case.num_blocks, case.layers, BLOCK_TOKENS), dtype=np.uint64)
        self._words = torch.from_numpy(self.pages.view(np.int64))
        self._states: dict[str, _State] = {}
        self._names = layer_names(case)
        self.layers = {
            name: self._words[:, layer].unsqueeze(1).unsqueeze(-1)
            for names in self._names
            for layer, name in enumerate(names)
        }
        connector.register_kv_caches(self.layers)

    # ------------------------------------------------------------------ one step

    def execute(self, output: Any) -> Any:
        connector, metadata = self._connector, output.kv_connector_metadata
        self.counts.steps += 1
        connector.handle_preemptions(metadata)
        self._update_states(output)
        connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        wrong = self._forward(output) if output.total_num_scheduled_tokens else {}
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        reports = self._reports(output)
        connector.clear_connector_metadata()
        self._judge(wrong, reports.invalid_block_ids)
        if not output.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(reports)
        return self._sample(output, reports)

    def _reports(self, output: Any) -> Any:
        results = self._connector.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self._connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self._connector.build_connector_worker_meta(),
        )

    def _sample(self, output: Any, reports: Any) -> Any:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            state, count = self._states[name], output.num_scheduled_tokens[name]
            state.computed += count
            tokens: list[int] = []
            if state.computed == len(state.prefixes.tokens):
                tokens = [state.prefixes.next_token()]
                state.prefixes.extend(tokens)
            sampled.append(tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=reports,
        )

    # ------------------------------------------------------------------ states

    def _update_states(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._states.pop(name, None)
        for data in output.scheduled_new_reqs:
            self._take_new(data)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            self._take_cached(cached, index, name)

    def _take_new(self, data: Any) -> None:
        tokens = data.prompt_token_ids
        if self._case.v2_runner:
            assert data.prefill_token_ids is not None, "the V2 runner is told all tokens"
            tokens = data.prefill_token_ids
            self.counts.resumed_v2 += data.req_id in self._states
        else:
            assert data.req_id not in self._states, "the V1 runner is told of a resumed request as a cached one"
        tables = [list(blocks) for blocks in data.block_ids]
        self._states[data.req_id] = _State(
            Prefixes(tokens), len(data.prompt_token_ids), tables, data.num_computed_tokens
        )

    def _take_cached(self, cached: Any, index: int, name: str) -> None:
        state, new_blocks = self._states[name], cached.new_block_ids[index]
        state.computed = cached.num_computed_tokens[index]
        state.prefixes.cut(state.prompt_tokens + cached.num_output_tokens[index])  # outputs the scheduler has dropped
        if name in cached.resumed_req_ids:
            assert not self._case.v2_runner, "the V2 runner is told of a resumed request as a new one"
            self.counts.resumed_v1 += 1
            state.tables = [list(blocks) for blocks in new_blocks]
        elif new_blocks is not None:
            for table, blocks in zip(state.tables, new_blocks, strict=True):
                table.extend(blocks)
        assert state.computed <= len(state.prefixes.tokens)

    # ------------------------------------------------------------------ the forward pass

    def _forward(self, output: Any) -> dict[str, str]:
        """Requests that would read wrong slots, with the first of them."""
        for names in self._names:
            for name in names:
                self._connector.wait_for_layer_load(name)
        wrong = self._compute(output.num_scheduled_tokens)
        for names in self._names:
            for name in names:
                self._connector.save_kv_layer(name, self.layers[name], None)
        return wrong

    def _compute(self, scheduled: dict[str, int]) -> dict[str, str]:
        """Whoever stands on good ground writes. A layer's writes come before its reads, so a request may stand on what
        another one of the same step writes: look again until nothing changes."""
        wrong = dict.fromkeys(scheduled, "")
        while True:
            still = {name: bad for name in wrong if (bad := self._check(name))}
            for name in wrong.keys() - still.keys():
                self._write(name, scheduled[name], garbage=False)
            if len(still) in (0, len(wrong)):
                break
            wrong = still
        for name in still:
            self._write(name, scheduled[name], garbage=True)
        return still

    def _check(self, name: str) -> str:
        state = self._states[name]
        for group, window in enumerate(self._case.windows):
            first = 0 if window is None else max(0, state.computed - window + 1)
            if first >= state.computed:
                continue
            positions = np.arange(first, state.computed)
            blocks = self._blocks(state, group, positions)
            self.counts.slots_checked += len(positions) * self._case.layers
            if (blocks == NULL_BLOCK).any():
                return f"{name}, group {group}: position {positions[blocks == NULL_BLOCK][0]} is in the null block"
            expected = state.prefixes.hashes(first, state.computed)
            for layer in range(self._case.layers):
                bad = self.pages[blocks, layer, positions % BLOCK_TOKENS] != expected ^ place_key(group, layer)
                if bad.any():
                    at = int(positions[bad][0])
                    block = int(blocks[bad][0])
                    return f"{name}, group {group}, layer {layer}: {int(bad.sum())} slots, first {at} in block {block}"
        return ""

    def _write(self, name: str, count: int, *, garbage: bool) -> None:
        state = self._states[name]
        positions = np.arange(state.computed, state.computed + count)
        values = state.prefixes.hashes(state.computed, state.computed + count)
        if garbage:
            values = values ^ np.uint64(GARBAGE)
        for group in range(len(self._case.windows)):
            blocks = self._blocks(state, group, positions)
            assert (blocks != NULL_BLOCK).all(), "the engine computes into the null block"
            for layer in range(self._case.layers):
                self.pages[blocks, layer, positions % BLOCK_TOKENS] = values ^ place_key(group, layer)

    def _blocks(self, state: _State, group: int, positions: Any) -> Any:
        table = np.asarray(state.tables[group], dtype=np.int64)
        self.counts.null_blocks += state.tables[group].count(NULL_BLOCK)
        return table[positions // BLOCK_TOKENS]

    def _judge(self, wrong: dict[str, str], invalid: set[int]) -> None:
        for name, text in wrong.items():
            if invalid & self._held(name):
                self.counts.tainted += 1
            else:
                self._findings.append(Finding("slot", f"step {self.counts.steps}: {text}"))

    def _held(self, name: str) -> set[int]:
        return {block for table in self._states[name].tables for block in table}
