"""A browser and a JavaScript engine for the tests of the pages.

Without a Chromium the tests that need one are skipped, in one line that cannot be overlooked; they fail where CI=true
and `make system`, which continuous integration begins with, installs one. The page's functions are called in node where
it is installed (a fraction of a second), else in the browser.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcore.reports import parameters
from kvcore.reports.kinds import breakeven, ladder, replay, trace
from kvcore.reports.page import Report, Work, write
from kvcore.reports.page.html import asset

ROOT = Path(__file__).resolve().parents[3]
MISSING = "NOT CHECKED: there is no Chromium here to look at the pages with (Debian's package: chromium)"
JS_SECONDS_MAX = 120  # node starts in 0.1 s on an idle machine

Js = Callable[[str, str, Any], Any]


def _module(name: str) -> ModuleType:
    full_name = f"kvcore_tests_pages_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


def should_be_here(root: Path) -> bool:
    """Does .ci/run install what scripts/system.sh lists, and is a Chromium in that list?"""
    wanted = next(
        line for line in (root / "scripts" / "system.sh").read_text().splitlines() if line.startswith("WANTED=")
    )
    return "chromium" in wanted and "make system" in (root / ".ci" / "run").read_text()


def _no_browser(pytestconfig: pytest.Config) -> None:
    if os.environ.get("CI") == "true" and should_be_here(ROOT):
        pytest.fail(f"{MISSING}, although .ci/run has `make system` install it")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{MISSING}", file=sys.__stderr__, flush=True)
    pytest.skip(MISSING)


@pytest.fixture(scope="session")
def chromium(pytestconfig: pytest.Config) -> Iterator[Any]:
    """One browser for all tests; each opens its own page."""
    module = _module("browser")
    path = module.find_browser()
    if path is None:
        _no_browser(pytestconfig)
    with module.Browser(path) as browser:
        yield browser


@pytest.fixture(scope="session")
def javascript(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Js:
    """`javascript(asset, expression, data)`: the value of an expression over the asset's functions and `data`."""
    node = shutil.which("node")
    if node is None:
        return lambda name, expression, data: request.getfixturevalue("chromium").run(_program(name, expression, data))
    folder = tmp_path_factory.mktemp("javascript")

    def run(name: str, expression: str, data: Any) -> Any:
        file = folder / "program.js"
        file.write_text(f"console.log(JSON.stringify({_program(name, expression, data)}));")
        done = subprocess.run([node, str(file)], capture_output=True, text=True, timeout=JS_SECONDS_MAX, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def _program(name: str, expression: str, data: Any) -> str:
    return f"(() => {{ {asset(name)}\nconst data = {json.dumps(data)}; return {expression}; }})()"


def silent(line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="session")
def breakeven_report() -> Report:
    question = breakeven.Question(models=("Llama-3.1-8B", "gpt-oss-20b"), hosts=("H100", "A100"))
    return breakeven.build(parameters.read(None), question, Work(silent))


@pytest.fixture(scope="session")
def ladder_report() -> Report:
    folder = Path(__file__).with_name("results")
    files = ladder.read_files(folder / "ladder.json", folder / "swarm.json", folder / "zoo.json")
    return ladder.build(files)


@pytest.fixture(scope="session")
def trace_report() -> Report:
    tiers = (("host memory (DMA)", 8 << 30, False),)
    ask = replay.Ask("generated", 40, False, 3, tiers=tiers, loads=(0.1, 1.0))
    return trace.build(replay.prepare(ask, None), Work(silent))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Report], Path]:
    """Write a report; its page."""

    def write_it(report: Report) -> Path:
        made = {"command": "kvcore report", "seed": None, "commit": "c", "changed": False, "versions": {"kvcore": "0"}}
        write(report, tmp_path / "report", {**made, "cpu": "a", "cores": 1, "platform": "p", "created": "now"})
        return tmp_path / "report" / "index.html"

    return write_it
