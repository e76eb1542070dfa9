"""`TinyEngine`: vLLM's real `LLM` in this process, stepped from outside, with a look behind it between two steps.

Scheduler, model runner, attention kernels and connector are vLLM's; only the model is small. The engine runs in this
process and thread (`VLLM_ENABLE_V1_MULTIPROCESSING=0`, one worker), so whoever steps it sees block tables and KV pages
at moments at which nothing computes.

`hold_blocks` takes blocks out of the pool as a request of somebody else would, so that one engine serves roomy and
tight passes: building an engine takes seconds.

Who holds: an engine its pages and connector until `close`; several may live one after the other in a process.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BLOCK_TOKENS = 32
SEQUENCES_MAX = 32
STEP_TOKENS = 512
STEPS_MAX = 10_000
STUCK_AFTER_S = 60.0
"""And after so many steps: one in which everybody waits for a busy machine's cache takes no time."""
SETTLES_IN_S = 120.0
_IDLE_STEP_S = 0.0005

_ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KVCORE_LADDER_FINGERPRINT": "1",  # kvcore's plugin may make this model known to vLLM
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    request_id: str
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class EngineStuck(Exception):
    """The engine does not end what it was asked for; the text says what is waiting."""


def prepare_process() -> None:
    """Before vLLM is imported. What the caller has set stays."""
    for name, value in _ENVIRON.items():
        os.environ.setdefault(name, value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of other people's packages are no findings of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class TinyEngine:
    """See the module text. `transfer`: arguments of `KVTransferConfig`; None: no connector."""

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int,
        positions: int,
        prefix_cache: bool = False,
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        prepare_process()
        with _quiet():
            from vllm import LLM
            from vllm.config import KVTransferConfig

            options = {"max_num_batched_tokens": STEP_TOKENS, **options}
            self._llm: Any = LLM(
                model=str(model),
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                block_size=BLOCK_TOKENS,
                max_model_len=positions,
                max_num_seqs=SEQUENCES_MAX,
                seed=0,
                enable_prefix_caching=prefix_cache,
                num_gpu_blocks_override=num_blocks,
                disable_log_stats=True,
                kv_transfer_config=None if transfer is None else KVTransferConfig(kv_role="kv_both", **transfer),
                **options,
            )
        core = self._llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = core.scheduler
        self._context = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        self._held: list[Any] = []
        self.steps = 0

    # ------------------------------------------------------------------ what it looks like inside

    @property
    def connector(self) -> Any:
        """The scheduler's half; None without one."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The worker's half."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def runner(self) -> Any:
        """The model runner of the one worker."""
        return self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def windows(self) -> list[int | None]:
        """Of each cache group; None is full attention."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]

    def pages(self) -> list[list[torch.Tensor]]:
        """[group][layer]: [blocks, ...], the engine's own memory."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return [[self._context[name].kv_cache for name in group.layer_names] for group in groups]

    def table(self, request_id: str) -> Sequence[Sequence[int]]:
        """Block ids of each group; 0 is the null block."""
        found: Sequence[Sequence[int]] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return found

    @property
    def blocks_held(self) -> int:
        """By anybody but `hold_blocks`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - len(self._held))

    # ------------------------------------------------------------------ work

    def serve(self, asks: Sequence[Ask], between: Callable[[], None] | None = None) -> dict[str, Answer]:
        """All at once. `between` is called after every step. Raises `EngineStuck`."""
        for ask in asks:
            self._add(ask.request_id, ask.prompt, ask.output_tokens)
        return self._run(between)

    def _add(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        with _quiet():
            self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)

    def _run(self, between: Callable[[], None] | None) -> dict[str, Answer]:
        engine = self._llm.llm_engine
        answers: dict[str, Answer] = {}
        with _quiet():
            steps_max, end = self.steps + STEPS_MAX, time.monotonic() + STUCK_AFTER_S
            while self.steps < steps_max or time.monotonic() < end:
                if not engine.has_unfinished_requests():
                    return answers
                for output in engine.step():
                    if output.finished:
                        answers[output.request_id] = _answer(output.outputs[0])
                self.steps += 1
                if between is not None:
                    between()
        raise EngineStuck(f"not done after {STEPS_MAX} steps and {STUCK_AFTER_S:g} s: {self._describe()}")

    def _describe(self) -> str:
        scheduler = self.scheduler
        waiting = [request.request_id for request in scheduler.waiting]
        return f"{len(scheduler.running)} running, {len(waiting)} waiting: {waiting[:5]}"

    def settle(self) -> None:
        """Step until no block is held by an ended request. Raises `EngineStuck`.

        The engine steps only while it has requests: connectors are told of ends, and asked for theirs, in steps.
        """
        core = self._llm.llm_engine.engine_core.engine_core
        with _quiet():
            end = time.monotonic() + SETTLES_IN_S
            while time.monotonic() < end:
                if not self.blocks_held and not self.scheduler.has_requests():
                    return
                core.step_fn()
                time.sleep(_IDLE_STEP_S)  # nothing is computed: the connector's threads have the time
        raise EngineStuck(f"{self.blocks_held} blocks are held after the last request has ended: {self._describe()}")

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache. Nothing may run."""
        if not self.scheduler.reset_prefix_cache():
            raise EngineStuck(f"the prefix cache cannot be emptied: {self.blocks_held} blocks are held")

    @contextmanager
    def hold_blocks(self, leave_free: int) -> Iterator[None]:
        """Inside, at most `leave_free` blocks can be had."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self._held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - leave_free))
        try:
            yield
        finally:
            held, self._held = self._held, []
            pool.free_blocks(held)

    def close(self) -> None:
        """End the engine and its connector; the process can have another one afterwards."""
        if self._llm is None:
            return
        with _quiet():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm, self.scheduler, self._context = None, None, None
            gc.collect()


def _answer(output: Any) -> Answer:
    chosen = zip(output.token_ids, output.logprobs, strict=True)
    return Answer(tuple(output.token_ids), tuple(step[token].logprob for token, step in chosen))
