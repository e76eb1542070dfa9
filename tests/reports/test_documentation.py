"""docs/cost-model.md: its examples run, its example file is a file we read. The samples: every figure has a formula."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import re
from pathlib import Path

import pytest

from kvcore.reports import parameters

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "reports/samples/peers/report.json"
"""It stays as it was made on the day of the measurement."""
SAMPLES = sorted(set((ROOT / "reports" / "samples").glob("*/report.json")) - {PEERS})
PAGE = (ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found.group(1)


def test_the_example_file_of_the_page_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(block("json"))
    known = parameters.read(file)
    assert known.model("my-7B").kv_bytes_per_token() == 28 * 2 * 4 * 128 * 2
    assert known.host("my GPU").flops == 165e12
    assert known.tier("my file server").bytes_per_s == 3e9


def test_the_example_of_the_page_prints_what_it_says() -> None:
    code = block("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/cost-model.md", "exec"), {})
    said = re.search(r"# (\d+): load from", code)
    assert said
    assert printed.getvalue().splitlines()[0] == said.group(1)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parent.name)
def test_every_column_of_figures_states_its_formula(sample: Path) -> None:
    """Names and words need none."""
    columns = [column for table in json.loads(sample.read_text())["tables"] for column in table["columns"]]
    figures = [column for column in columns if column["kind"] not in ("text", "code")]
    assert [column["title"] for column in figures if not column["formula"]] == []
    assert figures


@pytest.mark.parametrize("sample", [*SAMPLES, PEERS], ids=lambda sample: sample.parent.name)
def test_all_forms_of_a_sample_hold_the_same(sample: Path) -> None:
    """Each figure of the JSON in the CSV to the last digit, each sentence on the page, no file that nobody names."""
    tree = json.loads(sample.read_text())
    assert sorted(tree["files"]) == sorted(path.name for path in sample.parent.iterdir())
    page = html.unescape((sample.parent / "index.html").read_text(encoding="utf-8"))
    assert [sentence for sentence in tree["verdict"] if sentence not in page] == []
    for number, table in enumerate(tree["tables"]):
        name = "table.csv" if number == 0 else f"table-{table['name']}.csv"
        with (sample.parent / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = [column["name"] for column in table["columns"]]
        wanted = [{name: "" if row[name] is None else str(row[name]) for name in columns} for row in table["rows"]]
        assert rows == wanted, name
