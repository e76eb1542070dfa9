"""`kvcore report peers`: what is lost is said first, bars are judged, and a file that is none is refused."""

from __future__ import annotations

import json

import pytest

from kvcore import cli
from kvcore.errors import ConfigError
from kvcore.reports.kinds import peers


def figure(ours, theirs, bar=None, *, what="a figure", more=False, cpu=None):
    side = {"min": 0.5, "max": 9.0, "n": 5}
    return {
        "group": "L1",
        "what": what,
        "unit": "us",
        "bar": bar,
        "advantage": ours / theirs if more else theirs / ours,
        "cpu_advantage": cpu,
        "kvcore": {"median": ours, **side},
        "lmcache": {"median": theirs, **side},
    }


def tree(**figures):
    return {
        "schema": 2,
        "sizes": {"rounds": 5},
        "versions": {"kvcore": {"kvcore": "0.1.0"}, "lmcache": {"lmcache": "0.5.6"}},
        "machine": {"cpus": 2, "load_before": 1.0, "load_after": 1.0},
        "figures": figures,
        "not_comparable": ["apples and pears"],
    }


@pytest.fixture
def written(tmp_path):
    def write(value):
        path = tmp_path / "peers.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


def test_a_lost_figure_is_said_first_and_a_missed_bar_makes_the_verdict_bad(written):
    report = peers.build(
        written(
            tree(
                a=figure(1.0, 4.0, 3.0, what="fast"), b=figure(2.0, 5.0, 3.0, what="short"), c=figure(2, 1, what="slow")
            )
        )
    )
    assert report.verdict == (
        "kvcore loses at 1 figure: slow (0.50 x).",
        "1 of 2 bars met.",
        "Missed: short (2.50 of 3).",
    )
    assert report.good is False
    assert [row["verdict"] for row in report.tables[0].rows] == ["pass", "missed", ""]


def test_met_bars_and_no_loss(written):
    report = peers.build(written(tree(cycle_1=figure(1.0, 4.0, 3.0), cycle_64=figure(1.0, 5.0, 3.0, what="b"))))
    assert report.verdict == ("kvcore loses at none of 2 figures.", "2 of 2 bars met.")
    assert report.good is True
    lines = report.charts[-1]
    assert [series.name for series in lines.series] == ["kvcore", "LMCache"]
    assert lines.series[0].xs == [1, 64]


def test_the_page_has_the_table_the_picture_and_what_cannot_be_compared(written, tmp_path):
    path = written(tree(cycle_1=figure(1.0, 4.0, 3.0, cpu=4.5)))
    assert cli.main(["report", "peers", str(path), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "kvcore beside LMCache 0.5.6" in page
    assert "apples and pears" in page
    assert {file.name for file in (tmp_path / "page").iterdir()} >= {
        "report.json",
        "table.csv",
        "by_processor_time.png",
        "l1_cycle.png",
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no json", "JSON is malformed"),
        ({"schema": 1, "figures": {}}, "no comparison of schema 2"),
        ([], "got `array`"),
        ({"schema": 2, "figures": {"a": {}}}, "missing required field"),
        (tree(a={"bar": 1}), "missing required field"),
        (tree(), "Expected `object` of length >= 1"),
        (tree(a=figure(1.0, 4.0, what=["a list"])), r"at `\$.figures\[...\].what`"),
        (tree(a={**figure(1.0, 4.0), "advantage": -1}), r"Expected `float` > 0.0 - at `\$.figures\[...\].advantage`"),
        (tree(a={**figure(1.0, 4.0), "advantage": 1e308}), "<= 1000000000.0"),
        (tree(a={**figure(1.0, 4.0), "advantage": float("nan")}), "JSON is malformed"),
        (tree(a=figure(float("inf"), 4.0)), "JSON is malformed"),
        ({**tree(a=figure(1.0, 4.0)), "machine": {"load": float("inf")}}, "JSON is malformed"),
    ],
)
def test_a_file_that_is_none_is_refused(written, value, says):
    with pytest.raises(ConfigError, match=says):
        peers.build(written(value))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        peers.build(tmp_path / "nothing")
