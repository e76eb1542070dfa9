"""Whatever is wrong with the input of `kvcore ladder`: one clear line, exit status 2, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.cli import main

GOOD_LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1]}\n'


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `kvcore ladder` here; the one line it says."""
    try:
        status = main(["ladder", *arguments])
    except SystemExit as end:  # argparse
        status = end.code  # type: ignore[assignment]
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("kvcore ladder: error: ")
    return output.err


def everything_below(root: Path) -> list[tuple[str, bytes]]:
    return [(str(path), path.read_bytes() if path.is_file() else b"") for path in sorted(root.rglob("*"))]


def test_an_unknown_rung_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'9' does not exist" in refused(capsys, "--rungs", "9")


@pytest.mark.parametrize("rungs", ["", "two", "3-1", "-1", "0-4-5", "1,,2"])
def test_rungs_that_are_no_rungs_are_refused(capsys: pytest.CaptureFixture[str], rungs: str) -> None:
    assert "--rungs" in refused(capsys, f"--rungs={rungs}")


def test_an_unknown_target_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean local?" in refused(capsys, "--target", "locale")


def test_a_missing_trace_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "no.jsonl"
    assert str(missing) in refused(capsys, "--trace", str(missing))


def test_a_malformed_trace_line_is_named_by_its_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD_LINE * 2 + '{"timestamp": 0, "input_length": "many"}\n')
    line = refused(capsys, "--trace", str(trace))
    assert "line 3" in line
    assert "is missing" in line


def test_a_trace_that_is_not_json_is_named_by_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD_LINE + "not json\n")
    assert "line 2" in refused(capsys, "--trace", str(trace))


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", ""])
def test_a_seed_is_a_whole_number(capsys: pytest.CaptureFixture[str], seed: str) -> None:
    assert "--seed takes a whole number" in refused(capsys, f"--seed={seed}")


def test_an_l1_smaller_than_a_chunk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "100 bytes cannot hold one chunk" in refused(capsys, "--l1", "100")


def test_a_size_without_a_unit_that_exists_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "known are b, kb, mb, gb, tb, kib, mib, gib, tib" in refused(capsys, "--l1", "8parsecs")


def test_a_chunk_size_that_no_group_can_have_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--chunk-tokens", "10")
    assert "10" in line
    assert "multiple" in line


@pytest.mark.parametrize("value", ["0", "-16", "64", "100000000", "many"])
def test_a_chunk_has_tokens_but_not_too_many(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert value in refused(capsys, "--chunk-tokens", value)


@pytest.mark.parametrize("requests", ["0", "-5", "39"])
def test_too_few_requests_are_refused(capsys: pytest.CaptureFixture[str], requests: str) -> None:
    assert "20 families" in refused(capsys, "--requests", requests)


def test_an_unknown_cell_is_answered_with_what_cells_look_like(capsys: pytest.CaptureFixture[str]) -> None:
    assert "full/r1/inproc/sync" in refused(capsys, "--cell", "full/r9/inproc/sync")


def test_a_cell_that_the_target_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--target", "local", "--cell", "full/r1/s1/sync")
    assert "none of the chosen configurations" in line


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("sometimes",), "takes always or if-it-pays, not 'sometimes'"),
        (("if-it-pays", "--connector", "tests.ladder.dict_connector:DictConnector"), "kvcore's own connector"),
        (("if-it-pays", "--rungs", "5-8"), "storm rungs draw one per case"),
    ],
)
def test_an_admission_that_nobody_would_have_is_refused(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    line = refused(capsys, "--admission", *more)
    assert "--admission" in line
    assert said in line


def test_no_worker_processes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--jobs" in refused(capsys, "--jobs", "0")


def test_a_directory_for_simulated_files_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--target local" in refused(capsys, "--l2", str(tmp_path / "l2"))
    assert everything_below(tmp_path) == []


@pytest.mark.parametrize("below", ["file", "file/l2", "file/deep/l2"])
def test_an_l2_directory_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_bytes(b"not a directory")
    before = everything_below(tmp_path)
    assert "--l2" in refused(capsys, "--target", "local", "--l2", str(tmp_path / below))
    assert everything_below(tmp_path) == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system in which nobody can make files")
def test_an_l2_directory_that_even_root_cannot_make_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--l2" in refused(capsys, "--target", "local", "--l2", "/proc/self/kvcore-l2")


def test_an_l2_directory_with_somebody_elses_files_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_bytes(b"years of work")
    before = everything_below(tmp_path)
    assert "'thesis.tex'" in refused(capsys, "--target", "local", "--l2", str(tmp_path))
    assert everything_below(tmp_path) == before


def test_an_l2_directory_that_is_missing_is_not_made_for_a_run_that_does_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused(capsys, "--target", "local", "--l2", str(tmp_path / "a" / "b"), "--trace", str(tmp_path / "none"))
    assert everything_below(tmp_path) == []


def test_the_command_itself_says_one_line_and_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcore.cli", "ladder", "--json", "--rungs", "9"]
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "kvcore ladder: error: --rungs: rung '9' does not exist; the ladder has the rungs 0 to 8"
    ]
    assert everything_below(tmp_path) == []


def test_without_simpy_the_command_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'simpy':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from kvcore.cli import main\n"
        "sys.exit(main(['ladder']))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("kvcore ladder: error: target sim needs simpy, which is not installed: pip install")
    assert result.stderr.count("\n") == 1
