"""The simulated world as tests: a swarm of seeds, or the one case that somebody wants to see again.

pytest --pyargs kvcore.ladder.suite -m sim --sim-seed 7 --sim-seeds 1000
pytest --pyargs kvcore.ladder.suite -m sim --sim-replay case.json
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.sim
@pytest.mark.swarm
def test_no_seed_finds_anything(sim_swarm: Any, sim_case: Any) -> None:
    """Every token, byte, lease and deadline of every seed, whatever breaks meanwhile."""
    if sim_case is not None:
        pytest.skip("a case is replayed instead")
    from kvcore.ladder.swarm.swarm import run_swarm

    result = run_swarm(sim_swarm)
    assert result.verdict == "pass", "\n".join(result.lines())


@pytest.mark.sim
def test_the_replayed_case_finds_nothing(sim_case: Any) -> None:
    """The case of --sim-replay, with the bug of the zoo that it names."""
    if sim_case is None:
        pytest.skip("no --sim-replay was given")
    from kvcore.ladder.swarm.episode import run_case
    from kvcore.ladder.swarm.worker import planted

    with planted(sim_case.mutant):
        outcome = run_case(sim_case)
    assert outcome.verdict == "pass", "\n".join([sim_case.banner(), *outcome.lines()])
