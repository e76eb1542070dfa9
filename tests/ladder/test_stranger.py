"""Somebody else's connector on the ladder: a right one passes, wrong ones fail, and what is no connector is refused.

`dict_connector.py` beside this file knows nothing of kvcore but the connector interface.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.ladder.climb import cells_for, climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import LadderResult, failures

HERE = Path(__file__).parent
PLAIN = "full/r1/inproc/sync"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stranger's own modules, found as on anybody's path."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(tmp_path))


def climb(connector: str, *cells: str, **options: Any) -> LadderResult:
    chosen = {"cells": tuple(map(MatrixCell.parse, cells))} if cells else {}
    return climb_all(LadderOptions(connector=connector, **chosen, **options))


def refused(capsys: pytest.CaptureFixture[str], connector: str, *more: str) -> str:
    assert main(["ladder", "--connector", connector, *more]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    return output.err


def write_module(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / f"{name}.py").write_text("from dict_connector import *\nfrom dict_connector import _rotated\n" + text)
    return f"{name}:Mine"


def test_a_correct_connector_passes_every_rung() -> None:
    result = climb("dict_connector:DictConnector")
    assert failures(result.cells) == []
    assert result.verdict == "pass"
    assert [cell.cell for cell in result.cells] == ["full/r1/inproc/sync", "full/r2/inproc/sync"]
    rungs = {rung.rung: rung.counts for rung in result.totals()}
    assert list(rungs) == ["0", "1", "2", "3", "4", "replay"]
    assert rungs["3"].loads_verified > 0
    assert rungs["4"].preemptions > 0
    assert rungs["replay"].hit_share == 1.0


@pytest.mark.parametrize("broken", ["ShiftedStore", "ForgetfulLoad"])
def test_a_broken_connector_fails_and_the_finding_says_what_was_wrong(broken: str) -> None:
    result = climb(f"dict_connector:{broken}", PLAIN)
    found = failures(result.cells)
    assert result.verdict == "fail"
    # What is stored wrongly shows when it is loaded: on rung 2 already where prompts of the cold pass share chunks.
    assert result.cells[0].rungs[-1].rung in ("2", "3")
    assert result.cells[0].rungs[-1].counts.mismatches > 0
    assert any("[bytes]" in line and "wrong KV" in line for line in found)
    assert f"--connector dict_connector:{broken}" in result.cells[0].reproduce


def test_the_same_seed_gives_the_same_trace() -> None:
    passes = ("0", "2", "3")
    first, second = (climb("dict_connector:DictConnector", PLAIN, passes=passes) for _ in range(2))
    assert first.trace_hash == second.trace_hash != ""


def test_a_cache_that_never_hits_has_proved_nothing(tmp_path: Path) -> None:
    name = write_module(
        tmp_path,
        "never_hits",
        "class Mine(DictConnector):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.scheduler.hit = lambda tokens: 0\n",
    )
    found = failures(climb(name, PLAIN).cells)
    assert any("hit_share is 0" in line for line in found)


def test_a_promise_beyond_the_prompt_is_a_finding(tmp_path: Path) -> None:
    name = write_module(
        tmp_path,
        "promises_all",
        "class Mine(DictConnector):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.scheduler.matched_tokens = lambda request, local: (len(request.tokens) - local, False)\n",
    )
    found = failures(climb(name, PLAIN).cells)
    assert len(found) == 1
    assert "rung 2 (cold): [crash] PeerError: the connector promised" in found[0]


def test_an_exception_in_the_middle_of_a_climb_names_the_line(tmp_path: Path) -> None:
    name = write_module(
        tmp_path,
        "breaks_later",
        "class Mine(DictConnector):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.scheduler.preempted = self.give_up\n"
        "    def give_up(self, request_id):\n"
        "        raise KeyError(request_id)\n",
    )
    found = failures(climb(name, PLAIN).cells)
    assert len(found) == 1
    assert "rung 4 (hot, preempted): [crash] KeyError" in found[0]
    assert "breaks_later.py, line 8, in give_up" in found[0]


def test_a_load_that_never_ends_is_a_finding(tmp_path: Path) -> None:
    name = write_module(
        tmp_path,
        "waits_for_ever",
        "import asyncio\n"
        "class Mine(DictConnector):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.worker(0).wait_load = lambda layer: asyncio.get_running_loop().create_future()\n",
    )
    found = failures(climb(name, PLAIN).cells)
    assert "[liveness] not over after" in found[0]


def test_asynchronous_loads_are_climbed_where_the_class_makes_them() -> None:
    connector = "dict_connector:AsyncDictConnector"
    assert [str(cell) for cell in cells_for(LadderOptions(connector=connector))] == [
        "full/r1/inproc/sync",
        "full/r1/inproc/async",
        "full/r2/inproc/sync",
        "full/r2/inproc/async",
    ]
    result = climb(connector, "full/r2/inproc/async")
    assert failures(result.cells) == []


def test_a_class_with_a_near_tier_is_also_climbed_without_it() -> None:
    result = climb("dict_connector:TwoTierConnector", PLAIN)
    assert failures(result.cells) == []
    rungs = {rung.rung: rung.counts for rung in result.totals()}
    assert rungs["3b"].loads_verified > 0


def test_the_command_prints_the_connector_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--connector", "dict_connector:ShiftedStore", "--cell", PLAIN, "--json"]
    assert main(["ladder", *arguments]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["target"] == "dict_connector:ShiftedStore"
    assert data["verdict"] == "fail"


# ---- refused before anything starts


def test_a_connector_without_a_class_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "package.module:Class" in refused(capsys, "dict_connector")


def test_a_module_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No module named 'no_such_module'" in refused(capsys, "no_such_module:Class")


def test_a_module_that_cannot_be_imported_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "half_written.py").write_text("class Mine(:\n")
    assert "cannot import half_written: SyntaxError" in refused(capsys, "half_written:Mine")


def test_a_class_that_is_not_there_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean DictConnector?" in refused(capsys, "dict_connector:DictConector")


def test_a_class_that_raises_when_it_is_built_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = write_module(tmp_path, "cannot_be_built", "class Mine:\n    def __init__(self, config):\n        1 / 0\n")
    line = refused(capsys, name)
    assert "cannot be built: ZeroDivisionError: division by zero" in line
    assert "cannot_be_built.py, line 5, in __init__" in line


def test_a_class_that_raises_when_pages_are_registered_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = write_module(
        tmp_path,
        "wants_no_pages",
        "def no(pages, device):\n"
        "    raise TypeError('torch tensors only')\n"
        "class Mine(DictConnector):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.worker(0).register = no\n",
    )
    assert "register() raised TypeError: torch tensors only" in refused(capsys, name, "--cell", PLAIN)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    pass\n", "it has no scheduler, worker"),
        (
            "    scheduler = object()\n    def worker(self, rank): return object()\n",
            "its scheduler has no matched_tokens",
        ),
        ("    scheduler = DictScheduler\n    def worker(self, rank): return None\n", "its worker(0) has no register"),
        ("    scheduler = DictScheduler\n    def worker(self): pass\n", "worker(0) raised TypeError"),
    ],
)
def test_a_class_that_lacks_methods_is_refused_with_their_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str, expected: str, request: pytest.FixtureRequest
) -> None:
    module = f"lacks_{abs(hash(body)) % 10**8}"
    name = write_module(tmp_path, module, "class Mine:\n    def __init__(self, config): pass\n" + body)
    assert expected in refused(capsys, name)


def test_a_cell_that_the_class_refuses_is_said_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "dict_connector:DictConnector", "--cell", "full+window/r1/inproc/sync")
    assert "cannot be built: AssertionError" in line
    assert "dict_connector.py" in line


def test_an_asynchronous_cell_of_a_synchronous_class_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "dict_connector:DictConnector", "--cell", "full/r1/inproc/async")
    assert "does not load asynchronously" in line


def test_a_server_cell_is_not_for_strangers(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "dict_connector:DictConnector", "--cell", "full/r1/s1/sync")
    assert "none of the chosen configurations" in line


@pytest.mark.parametrize("more", [("--l1", "1MiB"), ("--l2", "/tmp/kvcore-unused"), ("--target", "local")])
def test_options_of_our_own_cache_are_refused(capsys: pytest.CaptureFixture[str], more: tuple[str, str]) -> None:
    assert "--connector" in refused(capsys, "dict_connector:DictConnector", *more)
