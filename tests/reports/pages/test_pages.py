"""The pages in a real browser: they render, answer to hands, complain about nothing and ask nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.reports import parameters
from kvcore.reports.cost import break_even, load_terms, prefill_terms
from kvcore.reports.page import Report
from kvcore.reports.stream import Requests, stream
from kvcore.reports.tier import host_memory

Written = Callable[[Report], Path]
LINES, BARS, MATRIX = "path", "rect", "rect"


def open_page(chromium: Any, page: Path) -> None:
    chromium.open(page)
    assert chromium.complaints() == []
    assert chromium.requests() == []


def value(chromium: Any, name: str) -> float | None:
    """The number behind a figure of the calculator."""
    text = chromium.run(f"document.getElementById('calc-out-{name}').dataset.value")
    return float(text) if text else None


@pytest.mark.parametrize("name", ["breakeven_report", "ladder_report", "trace_report"])
def test_a_page_renders_without_complaint_or_request(
    name: str, request: pytest.FixtureRequest, chromium: Any, written: Written, tmp_path: Path
) -> None:
    report: Report = request.getfixturevalue(name)
    open_page(chromium, written(report))
    text = chromium.run("document.querySelector('header').innerText")
    for sentence in report.verdict:
        assert sentence in text
    for table in report.tables:
        rows = chromium.run(f"document.querySelectorAll('#table-{table.name} tbody tr').length")
        assert rows == len(table.rows)
    drawn = chromium.run(
        "[...document.querySelectorAll('.chart')].map((one) => one.querySelectorAll('path, rect').length)"
    )
    assert len(drawn) == len(report.charts)
    assert all(shapes > 0 for shapes in drawn)
    chromium.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000  # a blank page has a tenth of that
    assert chromium.complaints() == []


def test_a_page_that_is_broken_or_asks_for_something_is_seen(chromium: Any, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(
        "<body data-ready='yes'><img src='https://kvcore.invalid/x.png'><script>console.error('no'); boom()</script>"
    )
    chromium.open(page)
    assert len(chromium.complaints()) >= 2
    assert chromium.requests() == ["https://kvcore.invalid/x.png"]


def test_the_policy_of_the_page_lets_nothing_out(chromium: Any, breakeven_report: Report, written: Written) -> None:
    open_page(chromium, written(breakeven_report))
    answer = chromium.run("fetch('https://kvcore.invalid/').then(() => 'out', (error) => String(error))")
    assert "TypeError" in answer
    assert any("Content Security Policy" in line for line in chromium.complaints())


def test_the_calculator_gives_what_python_gives(chromium: Any, breakeven_report: Report, written: Written) -> None:
    open_page(chromium, written(breakeven_report))
    known = parameters.read(None)
    model, host = known.model("Llama-3.1-8B"), known.host("H100")
    prefill, load = prefill_terms(model, host), load_terms(model, host_memory(host))
    at = stream(prefill, load, Requests(8192, 512, 0.5, 0.5))
    assert value(chromium, "recompute") == pytest.approx(host.request_s + prefill.seconds(8192 + 512))
    assert value(chromium, "loaded") == pytest.approx(host.request_s + load.seconds(8192) + prefill.seconds(512, 8192))
    assert value(chromium, "threshold") == break_even(prefill, load, rest_tokens=512, block_tokens=16)
    assert value(chromium, "always") == pytest.approx(host.request_s + at.always_s)


def test_sliders_change_the_numbers(chromium: Any, breakeven_report: Report, written: Written) -> None:
    open_page(chromium, written(breakeven_report))
    figures = ("recompute", "loaded", "threshold", "never", "always", "link", "hitsFloor", "loads", "capacity")
    moved = [  # control, where to, and what must be different afterwards
        ("prefix", 300, {"recompute", "loaded", "capacity"}),
        ("rest", 900, {"recompute", "loaded"}),
        ("bandwidth", 20, {"loaded", "threshold", "always", "link"}),
        ("hits", 900, {"always", "link"}),
        ("load", 900, {"never", "always"}),
        ("lookup", 900, {"loaded", "always"}),
        ("tier", "100G RDMA", {"loaded", "always"}),
        ("prefix", 800, {"recompute", "loaded"}),
        ("sharers", 300, {"always", "link"}),
    ]
    assert chromium.run("document.getElementById('calc-sharers').disabled"), "nobody shares a GPU's own link"
    for control, place, expected in moved:
        before = {name: value(chromium, name) for name in figures}
        words = chromium.run("document.getElementById('calc-answer').textContent")
        chromium.move(f"#calc-{control}", place)
        changed = {name for name in figures if value(chromium, name) != before[name]}
        assert expected <= changed, control
        assert chromium.run("document.getElementById('calc-answer').textContent") != words, control
    assert not chromium.run("document.getElementById('calc-sharers').disabled")
    assert chromium.complaints() == []


def test_another_tier_brings_its_bandwidth_and_its_verdict(
    chromium: Any, breakeven_report: Report, written: Written
) -> None:
    open_page(chromium, written(breakeven_report))
    chromium.run("document.getElementById('calc-rest').value = 0")
    chromium.move("#calc-rest", 0)
    chromium.move("#calc-tier", "100G RDMA")
    assert value(chromium, "threshold") == 624  # docs/cost-model.md
    chromium.move("#calc-tier", "S3")
    assert value(chromium, "threshold") is None
    assert "do not load" in chromium.run("document.getElementById('calc-answer').textContent")


def test_a_tip_follows_the_pointer(chromium: Any, breakeven_report: Report, written: Written) -> None:
    open_page(chromium, written(breakeven_report))
    assert chromium.run("document.getElementById('tip').hidden")
    chromium.point("#plots .chart svg")
    assert not chromium.run("document.getElementById('tip').hidden")
    tip = chromium.run("document.getElementById('tip').textContent")
    assert "recompute" in tip
    assert "Prefix length" in tip


def test_a_table_sorts_by_number(chromium: Any, breakeven_report: Report, written: Written) -> None:
    open_page(chromium, written(breakeven_report))
    column = [each.name for each in breakeven_report.tables[0].columns].index("break_even_tokens")
    cells = (
        f"[...document.querySelectorAll('#table-breakeven tbody tr')].map((row) => row.cells[{column}].dataset.sort)"
    )
    head = f"document.querySelectorAll('#table-breakeven th')[{column}].querySelector('button').click()"
    chromium.run(head)
    numbers = [int(text) for text in chromium.run(cells) if text]
    assert numbers == sorted(numbers)
    assert len(numbers) > 2
    chromium.run(head)
    assert [int(text) for text in chromium.run(cells) if text] == numbers[::-1]


def test_a_click_makes_a_hole_that_the_prefix_rule_explains(
    chromium: Any, ladder_report: Report, written: Written
) -> None:
    open_page(chromium, written(ladder_report))
    lengths = "document.querySelector('.cells').dataset.lengths"
    assert chromium.run(lengths) == ",".join(str(length) for length in range(13))
    chromium.run("document.querySelector('[data-cell=\"0,4\"]').click()")  # rank 0, full attention
    assert chromium.run(lengths) == "0,1,2,3,4"
    chromium.run("document.querySelectorAll('.cells .length')[7].click()")
    text = chromium.run("document.getElementById('prefix-text').textContent")
    assert "length 7 of 12 chunks" in text
    assert "row 0 (rank 0, group 0: full) needs chunks 0-6 and lacks 4" in text
    assert chromium.run("document.querySelector('[data-cell=\"0,4\"]').className") == "lacking"
    assert chromium.complaints() == []
