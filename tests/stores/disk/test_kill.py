"""A writing process is killed with SIGKILL in the middle, and the next one finds a store that can be believed.

200 cycles for each store, as `make test` has them; KVCORE_KILL_CYCLES chooses another number (`make soak`: 1,000). See
`churn.py` for what a cycle is and what is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CYCLES = int(os.environ.get("KVCORE_KILL_CYCLES", "200"))
CYCLE_S_MAX = 3.0  # far beyond what one takes: a hung child must not hold the tests for ever


def churn(kind, directory, cycles, seed, *bug):
    script = Path(__file__).with_name("churn.py")
    command = [sys.executable, str(script), kind, str(directory), str(cycles), str(seed), *bug]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30 + cycles * CYCLE_S_MAX)


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_no_wrong_byte_is_served_and_the_accounting_equals_the_directory_after_each_kill(kind, tmp_path):
    result = churn(kind, tmp_path / "store", CYCLES, 1)
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts["cycles"] == CYCLES
    assert counts["verified"] > 5 * CYCLES, "the children must find something to verify"
    assert counts["operations"] > CYCLES


@pytest.mark.parametrize("bug", ["lost", "early", "unchecked"])
def test_a_planted_bug_is_found(bug, tmp_path):
    """Deletions that do not reach the disk; records that appear before their payload; the same, and nobody checks."""
    result = churn("slab", tmp_path / "store", 400, 1, bug)
    assert result.returncode != 0
    assert "AssertionError" in result.stderr
