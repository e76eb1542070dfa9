"""`kvcore report`: what is refused before any work, what lies in the folder, and what an interrupt leaves."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.errors import ConfigError
from kvcore.reports import command
from kvcore.reports.kinds import breakeven
from kvcore.reports.page import Report, Work, provenance, read_report, write

RESULTS = Path(__file__).with_name("pages") / "results"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run a command that must be refused before anything is written; the one line that it says."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["report", *words]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1, said
        return said[0]

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["breakeven", "--model", "Llama-3.1-8"], "did you mean 'Llama-3.1-8B'"),
        (["breakeven", "--host", "H101"], "did you mean"),
        (["breakeven", "--tier", "100G RMDA"], "did you mean '100G RDMA'"),
        (["breakeven", "--tier", "hst memory"], "did you mean 'host memory (DMA)'"),
        (["breakeven", "--model", "all", "--model", "mine"], "unknown model 'mine'"),
        (["breakeven", "--out", "x" * 300], "File name too long"),
        (["breakeven", "--out", "r\udcff"], "'r\\udcff' is no UTF-8 text"),
        (["breakeven", "--load", "1.5"], "--load takes a number from 0 to 0.99"),
        (["breakeven", "--hits", "nan"], "--hits takes a number"),
        (["breakeven", "--block-tokens", "0"], "--block-tokens takes a whole number"),
        (["breakeven", "--parameters", "none.json"], "cannot read the parameters"),
        (["trace", "--trace", "conversatoin"], "did you mean 'conversation'"),
        (["trace", "--policy", "alway"], "did you mean 'always'"),
        (["trace", "--eviction", "mru"], "--eviction: unknown 'mru'"),
        (["trace", "--tier", "S3"], "--tier takes NAME=SIZE"),
        (["trace", "--tier", "S3=much"], "much"),
        (["trace", "--limit", "0"], "--limit takes a whole number"),
        (["trace", "--load", "-1"], "--load takes a number"),
        (["trace", "--trace", f"generated:{'9' * 5000}"], "is no whole number: write generated:7"),
        (["trace", "--trace", "generated:7", "--seed", "8"], "name two seeds: which one counts?"),
        (["goodput", "--limit", "1", "--slo", "ttft:1"], "all requests of generated arrive at once"),
        (["goodput", "--slo", "tftt:200"], "did you mean 'ttft'"),
        (["trace", "--tier", "host memory (DMA)=8GiB", "--tier", "S3=1KB"], "cannot hold one chunk of 512 tokens"),
        (["goodput", "--slo", "ttft"], "has no colon"),
        (["goodput", "--slo", ""], "the SLO is empty"),
        (["ladder"], "give at least one of --ladder, --swarm and --zoo"),
        (["ladder", "--zoo", "none.json"], "--zoo: cannot read none.json"),
        (["ladder", "--zoo", str(RESULTS / "swarm.json")], "is not what `kvcore zoo --json` writes"),
        (["compare", "a", "b"], "cannot read the report in a"),
        (["calibrate", "--prefix", "33"], "no multiple of 16"),
        (["calibrate", "--prefix", "4096"], "may have 512 tokens"),
        (["calibrate", "--rounds", "1"], "--rounds takes a whole number from 3"),
        (["calibrate", "--store", "nowhere"], "is no folder"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_any_work(refused: Refused, words: list[str], told: str) -> None:
    assert told in refused(*words)


def test_a_file_of_another_schema_is_refused(refused: Refused, tmp_path: Path) -> None:
    tree = json.loads((RESULTS / "zoo.json").read_text())
    (tmp_path / "zoo.json").write_text(json.dumps({**tree, "schema": 2}))
    assert "has schema 2, this version reads schema 1" in refused("ladder", "--zoo", "zoo.json")


def test_a_folder_that_exists_is_refused_and_force_replaces_reports_only(
    refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    assert "mine exists" in refused("breakeven", "--out", "mine")
    (tmp_path / "mine" / "thesis.txt").write_text("ten years")
    assert "no part of a report" in refused("breakeven", "--out", "mine", "--force")
    (tmp_path / "mine" / "thesis.txt").unlink()
    assert main(["report", "breakeven", "--out", "mine", "--force"]) == 0
    assert main(["report", "breakeven", "--out", "mine", "--force", "--host", "A100"]) == 0
    assert read_report(tmp_path / "mine")["tables"][0]["rows"][0]["host"] == "A100-SXM-80G"
    (tmp_path / "mine" / "notes.txt").write_text("added by hand")
    capsys.readouterr()
    assert "no part of a report" in refused("breakeven", "--out", "mine", "--force")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "added by hand"


def test_a_report_is_not_replaced_by_its_own_comparison(refused: Refused, tmp_path: Path) -> None:
    report = Report("breakeven", "t", ("v",))
    write(report, tmp_path / "a", provenance(None))
    write(report, tmp_path / "report-compare", provenance(None))
    assert "would replace a, which" in refused("compare", "a", "report-compare", "--out", "a", "--force")
    assert "would replace report-compare/report.json" in refused(
        "compare", "a", "report-compare/report.json", "--force"
    )


def test_a_folder_that_cannot_be_moved_away_is_not_replaced(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found out when the report was done: a mount point is busy, a working folder would be a removed one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    assert "it cannot be replaced" in refused("breakeven", "--out", "link", "--force")
    monkeypatch.chdir(tmp_path / "mine")
    assert "it cannot be replaced" in refused("breakeven", "--out", ".", "--force")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "mount")
    (tmp_path / "mine" / "mount").mkdir()
    assert "it cannot be replaced" in refused("breakeven", "--out", "mount", "--force")


@pytest.mark.parametrize("words", [["breakeven", "--parameters"], ["ladder", "--zoo"]])
def test_a_file_without_end_is_not_read_to_its_end(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """As /dev/zero is one, which says that it has no bytes."""
    (tmp_path / "long").write_bytes(bytes(2 << 20))
    monkeypatch.setattr("kvcore.reports.parameters.FILE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr("kvcore.reports.kinds.results.FILE_BYTES_MAX", 1 << 20)
    assert "long is larger than 1 MiB" in refused(*words, "long")


def test_a_place_that_cannot_be_written_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file exists" in refused("breakeven", "--out", "file")
    assert "is no folder that can be written to" in refused("breakeven", "--out", "file/below")
    if Path("/proc/self").is_dir():  # where the mode lets root write, and nobody can
        assert "is no folder that can be written to" in refused("breakeven", "--out", "/proc/report")


def test_the_folder_holds_page_pictures_tables_and_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "trace", "--limit", "12", "--tier", "host memory (DMA)=4GiB", "--out", "r"]) == 0
    tree = read_report(tmp_path / "r")
    assert sorted(tree["files"]) == sorted(path.name for path in (tmp_path / "r").iterdir())
    assert {"index.html", "report.json", "table.csv", "records.jsonl", "ttft_distribution.png"} <= set(tree["files"])
    made = tree["provenance"]
    assert set(made) >= {"command", "seed", "commit", "versions", "cpu", "cores"}
    assert made["versions"]["kvcore"]
    assert made["cpu"]
    assert tree["inputs"]["trace"]["requests"] == 12
    with (tmp_path / "r" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["ttft_mean_s"]) for row in rows] == [row["ttft_mean_s"] for row in tree["tables"][0]["rows"]]
    records = [json.loads(line) for line in (tmp_path / "r" / "records.jsonl").read_text().splitlines()]
    assert len(records) == 12 * len(rows)
    for record in records:
        assert record["hit_tokens"] + record["computed_tokens"] == record["input_tokens"]
    assert (tmp_path / "r" / "ttft_distribution.png").read_bytes().startswith(b"\x89PNG")
    assert tree["verdict"][0] in capsys.readouterr().out


def test_an_interrupt_keeps_what_is_done_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes as KeyboardInterrupt in the third of four cells."""
    seen: list[str] = []
    plain = breakeven._row

    def row(cell: breakeven.Cell, question: breakeven.Question) -> Any:
        seen.append(cell.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return plain(cell, question)

    monkeypatch.setattr(breakeven, "_row", row)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "breakeven", "--out", "r"]) == command.INTERRUPTED
    tree = read_report(tmp_path / "r")
    assert len(tree["tables"][0]["rows"]) == 2
    assert [name.rpartition(", ")[2] for name in tree["missing"]] == ["local NVMe gen4", "S3"]
    page = (tmp_path / "r" / "index.html").read_text()
    assert "This report is not complete" in page
    assert tree["missing"][1] in page
    assert "not done: " in capsys.readouterr().out


def test_interrupted_at_the_first_step_a_report_says_so() -> None:
    def stop() -> int:
        raise KeyboardInterrupt

    work = Work(lambda line: None)
    assert work.run([("one", stop), ("two", lambda: 2)]) == {}
    assert work.run([("three", lambda: 3)]) == {}
    assert work.missing == ["one", "two", "three"]


def test_an_interrupt_between_two_steps_keeps_what_was_done() -> None:
    """It came just after the name of the next step had been said, and the report was lost."""

    def say(line: str) -> None:
        if "2/3 two" in line:
            raise KeyboardInterrupt

    work = Work(say)
    assert work.run((name, lambda: 1) for name in ("one", "two", "three")) == {"one": 1}
    assert work.missing == ["two", "three"]
    assert work.interrupted


def test_cells_in_several_processes_give_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for jobs in ("1", "2"):
        assert main(["report", "trace", "--limit", "12", "--jobs", jobs, "--out", jobs]) == 0
    one, two = (read_report(tmp_path / jobs)["tables"][0]["rows"] for jobs in ("1", "2"))
    assert one == two
    assert "3/3 load if it pays: done" in capsys.readouterr().err


def test_steps_that_run_together_keep_what_was_done_before_an_interrupt() -> None:
    said: list[str] = []
    work = Work(said.append)

    def run(say: Callable[[int, int], None]) -> list[int]:
        say(1, 3)
        return [1]

    assert work.run_together(["one", "two", "three"], run) == {"one": 1}
    assert work.missing == ["two", "three"]
    assert work.interrupted
    assert work.run_together(["four"], run) == {}
    assert work.missing[2:] == ["four"]
    assert "1/3 one: done" in said[0]


def test_data_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    from kvcore.reports.page.html import embedded, page

    nasty = '</script><script>alert(1)</script><!-- & "quoted"'
    assert "<" not in embedded({"x": nasty})
    assert json.loads(embedded({"x": nasty})) == {"x": nasty}
    made = {"command": nasty, "seed": None, "commit": "", "changed": False, "versions": {}, "cpu": "", "cores": 1}
    text = page(Report("compare", nasty, (nasty,)), {**made, "platform": "", "created": ""}, ["index.html"])
    assert "<script>alert" not in text


def test_a_number_that_json_has_no_word_for_is_never_written(tmp_path: Path) -> None:
    report = Report("compare", "t", ("v",), records=[{"x": float("inf")}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(report, tmp_path / "r", {"command": ""})
    assert list(tmp_path.iterdir()) == []


def test_without_its_extra_a_report_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.reports.page import png

    monkeypatch.setattr(png, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install kvcore\[reports\]"):
        png.check_drawing()


def test_a_terminal_gets_the_first_names_of_what_is_missing() -> None:
    names = [f"cell {number}" for number in range(command.SHOWN + 2)]
    assert command.listed(names[:2]) == "cell 0, cell 1"
    assert command.listed(names) == f"{', '.join(names[:-2])} and 2 more"
