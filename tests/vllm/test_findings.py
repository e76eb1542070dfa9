"""Defects of vLLM 0.32.0 as described in docs/findings. A test that fails here means: mended upstream, adapt."""

from __future__ import annotations

import pytest

from kvcore.ladder.targets.vllm_scheduler.command import Hunt


def test_blocks_of_a_failed_synchronous_load_stay_in_the_prefix_cache() -> None:
    assert Hunt(None, ("prefix=1",))(102)[1].kinds >= {"slot"}
    assert not Hunt(None, ("prefix=0",))(102)[1].findings


@pytest.mark.parametrize("seed", [205, 222])
def test_a_failed_asynchronous_load_can_stop_the_scheduler(seed: int) -> None:
    assert Hunt("no-stranding", ())(seed)[1].kinds == {"stuck"}
    assert not Hunt(None, ())(seed)[1].findings


def test_loads_of_window_groups_can_wait_for_each_other() -> None:
    outcome = Hunt(None, ())(334)[1]
    assert outcome.counts["engine deadlocks"] == 1
    assert not outcome.findings
