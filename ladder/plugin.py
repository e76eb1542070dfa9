"""The pytest plugin (entry point `pytest11`): markers, options, fixtures, and the rung table in the terminal summary.

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
SUITE_SEEDS = 200
"""Of a swarm of the suite, when nobody says how many."""
_MARKERS = {
    "ladder": "climbs the preemption ladder",
    "sim": "runs cases of the simulated world, with faults",
    "swarm": "runs many seeds of the simulated world",
    "storm": "climbs the ladder while something is broken on purpose",
    "zoo": "plants a bug and must see it caught",
    "vllm": "needs vLLM",
}
_DEFAULTS = {
    "--ladder-target": "sim",
    "--ladder-rung": "0-4",
    "--ladder-cases": None,
    "--ladder-connector": None,
    "--ladder-connector-config": None,
    "--ladder-engine-config": None,
    "--ladder-model": None,
    "--ladder-trace": None,
    "--ladder-admission": "always",
    "--sim-seed": "0",
}
_SIM_DEFAULTS = dict.fromkeys(("--sim-seeds", "--sim-seconds", "--sim-replay", "--sim-artifacts"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcore ladder")

    def add(name: str, metavar: str, text: str) -> None:
        group.addoption(name, default=_DEFAULTS.get(name), metavar=metavar, help=text)

    add("--ladder-target", "NAME", "sim (default), local, torch or vllm")
    add("--ladder-rung", "0-4", "which rungs to climb; 5-8 are the storm rungs")
    add("--ladder-cases", "N", "cases of each storm rung (default 250)")
    add("--ladder-connector", "MOD:CLASS", "climb with your own connector")
    add("--ladder-connector-config", "JSON", "its kv_connector_extra_config (target vllm)")
    add("--ladder-engine-config", "JSON", "arguments for vLLM's LLM (target vllm)")
    add("--ladder-model", "NAME", "llama, gemma3, gpt-oss, fingerprint or fingerprint-window (target vllm)")
    add("--ladder-trace", "FILE", "Mooncake-format trace to take requests from")
    add("--ladder-admission", "WHAT", "what is loaded: always (default), or if-it-pays")
    add("--sim-seed", "N", "seed of the simulated world; the first one of a swarm")
    add("--sim-seeds", "N", f"seeds of the suite's swarm (default {SUITE_SEEDS}, unless --sim-seconds is given)")
    add("--sim-seconds", "S", "end the suite's swarm after this time")
    add("--sim-replay", "CASE", "a case that the suite runs: a case.json, the directory of a failure, or a line")
    add("--sim-artifacts", "DIR", "write a directory per failure of a swarm into DIR")


def pytest_configure(config: pytest.Config) -> None:
    for name, text in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text} (kvcore)")
    if any(config.getoption(name) is not None for name in _SIM_DEFAULTS):
        _swarm_options(config)
        _replayed_case(config)
    if any(config.getoption(name) != default for name, default in _DEFAULTS.items()):
        _options(config)  # unusable ones end the run here, with one line


def _options(config: pytest.Config) -> Any:
    """The `LadderOptions` of this run. Raises `pytest.UsageError`."""
    from pathlib import Path

    from kvcore.errors import ConfigError
    from kvcore.ladder.options import (
        CHUNK_TOKENS,
        REQUESTS,
        LadderOptions,
        check_admission,
        check_cases,
        check_mapping,
        check_model,
        check_rungs,
        check_seed,
        check_storms,
        check_target,
        load_connector,
    )

    option = config.getoption
    trace, connector = option("--ladder-trace"), option("--ladder-connector")
    try:
        target = check_target(option("--ladder-target"))
        if connector is not None and target != "vllm":  # vLLM imports it, after its environment was set
            load_connector(connector)
        passes, storms = check_rungs(option("--ladder-rung"), "--ladder-rung")
        options = LadderOptions(
            target=target,
            passes=passes,
            storms=storms,
            cases=check_cases(option("--ladder-cases"), "--ladder-cases"),
            seed=check_seed(option("--sim-seed"), "--sim-seed"),
            requests=REQUESTS[target],
            connector=connector,
            trace=Path(trace) if trace else None,
            chunk_tokens=CHUNK_TOKENS[target],
            admission=option("--ladder-admission"),
            model=check_model(option("--ladder-model"), target, "--ladder-model"),
            connector_config=check_mapping(option("--ladder-connector-config"), target, "--ladder-connector-config"),
            engine_config=check_mapping(option("--ladder-engine-config"), target, "--ladder-engine-config"),
        )
        check_storms(options)
        check_admission(options, "--ladder-admission")
        return options
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None


def _swarm_options(config: pytest.Config) -> Any:
    """The `SwarmOptions` of this run. Raises `pytest.UsageError`."""
    from pathlib import Path

    from kvcore.errors import ConfigError
    from kvcore.ladder.options import check_seed
    from kvcore.ladder.swarm.command import check_artifacts, check_count, check_seconds
    from kvcore.ladder.swarm.swarm import SwarmOptions

    seeds, seconds, artifacts = map(config.getoption, ("--sim-seeds", "--sim-seconds", "--sim-artifacts"))
    try:
        return SwarmOptions(
            first=check_seed(config.getoption("--sim-seed"), "--sim-seed"),
            seeds=check_count(seeds, "--sim-seeds") if seeds else 0 if seconds else SUITE_SEEDS,
            seconds=check_seconds(seconds, "--sim-seconds") if seconds else 0.0,
            artifacts=check_artifacts(Path(artifacts), "--sim-artifacts") if artifacts else None,
        )
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None


def _replayed_case(config: pytest.Config) -> Any:
    """The `Case` of `--sim-replay`; None without it. Raises `pytest.UsageError`."""
    given = config.getoption("--sim-replay")
    if given is None:
        return None
    from kvcore.errors import ConfigError
    from kvcore.ladder.repro.line import CannotJudge, find_case

    try:
        return find_case(given)
    except (ConfigError, CannotJudge) as error:
        raise pytest.UsageError(f"--sim-replay: {error}") from None


@pytest.fixture(scope="session")
def sim_swarm(pytestconfig: pytest.Config) -> Any:
    """The `SwarmOptions` of this run."""
    return _swarm_options(pytestconfig)


@pytest.fixture(scope="session")
def sim_case(pytestconfig: pytest.Config) -> Any:
    """The `Case` that `--sim-replay` names, or None."""
    return _replayed_case(pytestconfig)


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
    from kvcore.ladder.swarm_rungs.result import storm_from_json
    from kvcore.ladder.table import render

    order = [str(cell) for cell in FULL_MATRIX]
    cells = [cell_from_json(climb["cell"]) for climb in climbs if "cell" in climb]
    cells.sort(key=lambda cell: order.index(cell.cell))
    storms = sorted(
        (storm_from_json(climb["storm"]) for climb in climbs if "storm" in climb), key=lambda each: each.rung
    )
    first = next((climb for climb in climbs if "cell" in climb), climbs[0])
    traces = combined_hash(cells, storms)
    result = LadderResult(first["target"], first["workload"], cells, traces, first["seed"], storms)
    terminalreporter.section("preemption ladder")
    terminalreporter.write_line(render(result))
