"""The pytest plugin (entry point `pytest11`): markers, options, and the rung table in the terminal summary.

Imports nothing but pytest until a ladder test runs, and works without simpy installed. Results travel from worker
processes as user properties, so the table is complete under pytest-xdist and each test carries them into JUnit files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

PROPERTY = "kvcore_ladder"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcore ladder")
    group.addoption("--ladder-target", default="sim", help="sim (default) or local")
    group.addoption("--ladder-rung", default="0-4", metavar="0-4", help="which rungs to climb; rung 0 always runs")
    group.addoption("--ladder-connector", default=None, metavar="MOD:CLASS", help="climb with your own connector")
    group.addoption("--ladder-trace", default=None, metavar="FILE", help="Mooncake-format trace to take requests from")
    group.addoption("--sim-seed", default="0", metavar="N", help="seed of the simulated world")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ladder: climbs the preemption ladder (kvcore)")


@pytest.fixture(scope="session")
def ladder_options(pytestconfig: pytest.Config) -> Any:
    """The `LadderOptions` of this run. Unusable options end the session with one line and pytest's usage status."""
    from pathlib import Path

    from kvcore.errors import ConfigError
    from kvcore.ladder.options import LadderOptions, check_rungs, check_seed, check_target

    option = pytestconfig.getoption
    trace = option("--ladder-trace")
    try:
        return LadderOptions(
            target=check_target(option("--ladder-target")),
            passes=check_rungs(option("--ladder-rung")),
            seed=check_seed(option("--sim-seed")),
            connector=option("--ladder-connector"),
            trace=Path(trace) if trace else None,
        )
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None


def _climbs(terminalreporter: Any) -> Iterator[dict[str, Any]]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    yield json.loads(value)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The rungs summed over all climbs of this session, then failures with one reproducing line each."""
    climbs = list(_climbs(terminalreporter))
    if not climbs:
        return
    from kvcore.ladder.result import LadderResult, cell_from_json
    from kvcore.ladder.table import render

    first = climbs[0]
    cells = [cell_from_json(climb["cell"]) for climb in climbs]
    result = LadderResult(first["target"], first["workload"], cells, first["trace_hash"], first["seed"])
    terminalreporter.section("preemption ladder")
    terminalreporter.write_line(render(result))
