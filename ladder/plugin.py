"""The pytest plugin (entry point `pytest11`): markers, options, and the rung table in the terminal summary.

Imports nothing but pytest until an option or a ladder test asks for more, and works without simpy installed.

Results travel from worker processes as user properties, so the table is complete under pytest-xdist and each test
carries them into JUnit files: `kvcore_ladder` holds the whole climb as JSON, `ladder_rung_<rung>_<counter>` what one
looks for first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

PROPERTY = "kvcore_ladder"
_DEFAULTS = {
    "--ladder-target": "sim",
    "--ladder-rung": "0-4",
    "--ladder-connector": None,
    "--ladder-trace": None,
    "--sim-seed": "0",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcore ladder")

    def add(name: str, metavar: str, text: str) -> None:
        group.addoption(name, default=_DEFAULTS[name], metavar=metavar, help=text)

    add("--ladder-target", "NAME", "sim (default) or local")
    add("--ladder-rung", "0-4", "which rungs to climb; rung 0 always runs")
    add("--ladder-connector", "MOD:CLASS", "climb with your own connector")
    add("--ladder-trace", "FILE", "Mooncake-format trace to take requests from")
    add("--sim-seed", "N", "seed of the simulated world")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ladder: climbs the preemption ladder (kvcore)")
    if any(config.getoption(name) != default for name, default in _DEFAULTS.items()):
        _options(config)  # unusable ones end the run here, with one line


def _options(config: pytest.Config) -> Any:
    """The `LadderOptions` of this run. Raises `pytest.UsageError`."""
    from pathlib import Path

    from kvcore.errors import ConfigError
    from kvcore.ladder.options import REQUESTS, LadderOptions, check_rungs, check_seed, check_target, load_connector

    option = config.getoption
    trace, connector = option("--ladder-trace"), option("--ladder-connector")
    try:
        if connector is not None:
            load_connector(connector)
        target = check_target(option("--ladder-target"))
        return LadderOptions(
            target=target,
            passes=check_rungs(option("--ladder-rung"), "--ladder-rung"),
            seed=check_seed(option("--sim-seed"), "--sim-seed"),
            requests=REQUESTS[target],
            connector=connector,
            trace=Path(trace) if trace else None,
        )
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def ladder_options(pytestconfig: pytest.Config) -> Any:
    """The `LadderOptions` of this run."""
    return _options(pytestconfig)


@pytest.fixture(scope="session")
def ladder_cells(ladder_options: Any) -> Any:
    """The configurations that the target, or the user's connector, climbs in."""
    from kvcore.errors import ConfigError
    from kvcore.ladder.climb import cells_for

    try:
        return cells_for(ladder_options)
    except ConfigError as error:
        pytest.fail(str(error), pytrace=False)


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
    from kvcore.ladder.matrix import FULL_MATRIX
    from kvcore.ladder.result import LadderResult, cell_from_json, combined_hash
    from kvcore.ladder.table import render

    order = [str(cell) for cell in FULL_MATRIX]
    cells = sorted((cell_from_json(climb["cell"]) for climb in climbs), key=lambda cell: order.index(cell.cell))
    first = climbs[0]
    result = LadderResult(first["target"], first["workload"], cells, combined_hash(cells), first["seed"])
    terminalreporter.section("preemption ladder")
    terminalreporter.write_line(render(result))
