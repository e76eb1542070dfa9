"""Target `vllm`: vLLM's real engine on a CPU, with tiny random models, and kvcore's or anybody's connector.

    .venv-vllm/bin/kvcore ladder --target vllm
    .venv-vllm/bin/python -m pytest -m ladder --ladder-target vllm --ladder-connector pkg.mod:Class --ladder-model llama

Nothing is replaced: scheduler, model runner, attention kernels, block tables and KV pages are vLLM's. `climb` has the
rungs, `watch` what is compared, `engine` the engine, `models` the models, `caches` what is put behind them.
"""

from __future__ import annotations

from kvcore.ladder.targets.vllm.climb import CELLS, cells, check, climb_cell

__all__ = ["CELLS", "cells", "check", "climb_cell"]
