"""`scripts/gpu_check.sh` has to work on the first machine with a GPU: here it runs on an emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
HANGS_AFTER_S = 600


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(SCRIPT), *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | environ
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=HANGS_AFTER_S)


def test_the_whole_script_runs_on_an_emulated_device(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    result = run("--emulated", str(output))
    assert result.returncode == 0, result.stderr
    found = json.loads(output.read_text())
    assert found["device"] == "emulated"
    assert found["layouts_checked"] > 20
    assert {row["direction"] for row in found["blocks"]} == {"gather", "scatter"}
    assert {"pinned_copy", "torch"} <= found["blocks"][0]["gb_per_s"].keys()
    assert set(found["overlap"]) == {"matmul_ms", "copies_ms", "both_ms"}
    assert found["producer_to_store_us"] > 0


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    """No compiler on the path: the first thing that it looks for."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    result = subprocess.run(
        ["/bin/sh", str(SCRIPT), str(tmp_path / "x.json")],
        capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)}, timeout=HANGS_AFTER_S,
    )  # fmt: skip
    assert result.returncode == 2
    assert "no nvcc" in result.stderr
    assert not (tmp_path / "x.json").exists()
