"""What kvcore's hooks cost an engine whose requests have nothing to move.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m kvcore.ladder.targets.vllm.overhead

30 requests generate at once, with prompts too short to be cached, on the real engine with the cache in its process. The
time inside all hooks of both halves is added up per step; steps of the beginning and the end are left out.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.ladder.targets.vllm.caches import CONNECTOR, MODULE
from kvcore.ladder.targets.vllm.engine import Ask, TinyEngine
from kvcore.ladder.targets.vllm.models import tiny_model, write_model

REQUESTS = 30
PROMPT_TOKENS = 10
OUTPUT_TOKENS = 200
STEPS_LEFT_OUT = 15
STEP_US = 10_000
_SCHEDULER_HOOKS = (
    "build_connector_meta", "get_num_new_matched_tokens", "has_pending_block_frees", "has_pending_push_work",
    "take_events", "update_connector_output", "update_state_after_alloc",
)  # fmt: skip
_WORKER_HOOKS = (
    "bind_connector_metadata", "build_connector_worker_meta", "clear_connector_metadata",
    "get_block_ids_with_load_errors", "get_kv_connector_kv_cache_events", "get_kv_connector_stats",
    "get_transfer_results", "handle_preemptions", "save_kv_layer", "start_load_kv", "wait_for_layer_load",
    "wait_for_save",
)  # fmt: skip


class Stopwatch:
    """Time inside the hooks, per step."""

    def __init__(self) -> None:
        self._spent_ns = 0
        self.steps_us: list[float] = []

    def watch(self, connector: Any, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return hook(*arguments, **named)
            finally:
                self._spent_ns += time.perf_counter_ns() - begin

        return timed

    def step(self) -> None:
        self.steps_us.append(self._spent_ns / 1e3)
        self._spent_ns = 0


def measure(directory: Path) -> list[float]:
    """Microseconds inside the hooks, of each step in which all requests run."""
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"l1_bytes": 1 << 26},
    }
    model = write_model(tiny_model("llama"), directory / "llama")
    engine = TinyEngine(model, num_blocks=600, positions=384, transfer=transfer)
    stopwatch = Stopwatch()
    try:
        stopwatch.watch(engine.connector, _SCHEDULER_HOOKS)
        stopwatch.watch(engine.worker_connector, _WORKER_HOOKS)
        prompt = tuple(range(2, 2 + PROMPT_TOKENS))
        engine.serve([Ask(f"r{i}", (i + 2, *prompt), OUTPUT_TOKENS) for i in range(REQUESTS)], stopwatch.step)
    finally:
        engine.close()
    return stopwatch.steps_us[STEPS_LEFT_OUT:-STEPS_LEFT_OUT]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvv-") as directory:
        steps = sorted(measure(Path(directory)))
    median = statistics.median(steps)
    print(
        f"{len(steps)} steps with {REQUESTS} requests and nothing to move: median {median:.0f} us inside the hooks "
        f"({median / STEP_US:.2%} of a step of {STEP_US // 1000} ms), p10 {steps[len(steps) // 10]:.0f} us, "
        f"p90 {steps[len(steps) * 9 // 10]:.0f} us"
    )


if __name__ == "__main__":
    main()
