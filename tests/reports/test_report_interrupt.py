"""Ctrl-C, really sent: to a running command and all of its processes, as a terminal does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.reports.command import INTERRUPTED
from kvcore.reports.page import read_report

ENDS_IN_S = 300.0  # seconds on an idle machine; drawing is what takes long
LOADS = ["0.1", "0.2", "0.4", "0.6", "0.8", "1", "1.5", "2"]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Who is started in the background by a shell ignores SIGINT, and so does what he starts, tests included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("words", "first_done"),
    [
        (["trace"], "] 2/24 "),
        (["goodput", "--slo", "ttft:2000", "--jobs", "2"], "] 1/24 "),
    ],
    ids=["trace", "goodput in two processes"],
)
def test_an_interrupted_report_keeps_what_is_done_and_leaves_no_process(
    tmp_path: Path, words: list[str], first_done: str
) -> None:
    """It is sent when the first of 24 cells is done. The pipes end when the last process that has them does."""
    served = ["--limit", "6000", "--load", *LOADS]  # half a minute: a test that runs late still interrupts it
    command = [sys.executable, "-m", "kvcore.cli", "report", *words, *served, "--out", "r"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes) as process:
        assert process.stderr is not None
        said = ""
        while first_done not in said:
            line = process.stderr.readline()
            assert line, f"it has ended before: {said}"
            said += line
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=ENDS_IN_S)
    assert process.returncode == INTERRUPTED, errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["r"], output + errors
    report = read_report(tmp_path / "r")
    done, missing = report["tables"][0]["rows"], report["missing"]
    assert len(done) >= 1
    assert len(missing) == 3 * len(LOADS) - len(done)
    assert f"not done: {missing[0]}" in output
    assert "This report is not complete" in (tmp_path / "r" / "index.html").read_text()
