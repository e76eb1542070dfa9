"""Every public report is a test or has a reason: `docs/public-reports.md` and the docstrings of the tests agree.

The tables in the docs are the list of the reports' numbers and variants: R of those that were collected first, S of
those found since, each with its source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "docs" / "public-reports.md"
NUMBERS = (
    1,
    2,
    4,
    5,
    7,
    8,
    9,
    11,
    13,
    14,
    *range(16, 23),
    24,
    26,
    27,
    *range(29, 34),
    *range(35, 38),
    *range(39, 43),
    44,
)
NUMBERS += (45, 46, 47, 49, 50, 52, 53, 54, 56, 57, 58, 60, 61, 62, 63, 65, 67, 68, 71, 72, 73, 75)
ROW = re.compile(r"^\| R(\d\d)(?: ([a-z]))? \| ([^|]+) \| ([^|]*) \| ([^|]*) \|$")
FOUND = re.compile(r"^\| (S\d\d) \| ([^|]+) \| ([^|]+) \| ([^|]*) \| ([^|]*) \|$")
SOURCE = re.compile(r"[\w.-]+(?:/[\w.-]+)?#\d+")
ISSUES = "EFGHI"


class Row:
    def __init__(self, match: re.Match[str]) -> None:
        number, variant, self.what, tests, left = match.groups()
        self.number, self.variant, self.left = int(number), variant or "", left.strip()
        self.tests = re.findall(r"`([^`]+)`", tests)
        self.name = f"R{number}{self.variant}"


@cache
def rows() -> tuple[Row, ...]:
    lines = TABLE.read_text().splitlines()
    found = [match for line in lines if line.startswith("| R") and (match := ROW.match(line))]
    assert len(found) == sum(line.startswith("| R") for line in lines), "a row of the table is misshapen"
    return tuple(map(Row, found))


@dataclass(frozen=True)
class Found:
    """A report found since: what it is of, and either tests that name it or why there is none."""

    name: str
    sources: str
    what: str
    tests: tuple[str, ...]
    left: str


@cache
def found_since() -> tuple[Found, ...]:
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| S\d", line)]
    matches = [match for line in lines if (match := FOUND.match(line))]
    assert len(matches) == len(lines), "a row of what was found since is misshapen"
    return tuple(
        Found(name, sources, what, tuple(re.findall(r"`([^`]+)`", tests)), left.strip())
        for name, sources, what, tests, left in (match.groups() for match in matches)
    )


@cache
def functions(path: str) -> dict[str, str]:
    """The tests of a file: name -> what it says about itself."""
    tree = ast.parse((ROOT / path).read_text())
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in tests}


def numbers_in(name: str, docstring: str) -> set[int]:
    said = re.findall(r"\bR(\d\d)\b", docstring) + re.findall(r"(?:^|_)r(\d\d)(?=_)", name)
    said += re.findall(r"\bR(\d\d)[a-c]\b", docstring)
    return set(map(int, said))


def named_tests() -> Iterator[tuple[str, set[int]]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = str(path.relative_to(ROOT))
        for name, docstring in functions(relative).items():
            yield f"{relative}::{name}", numbers_in(name, docstring)


def test_the_table_names_every_report_once() -> None:
    assert {row.number for row in rows()} == set(NUMBERS)
    assert len({row.name for row in rows()}) == len(rows())
    variants = {row.number for row in rows() if row.variant}
    assert variants <= {row.number for row in rows() if not row.variant}, "a variant without its report"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_report_has_a_test_or_a_reason(row: Row) -> None:
    assert row.tests or row.left, f"{row.name} is neither tested nor left with a reason"
    assert not row.left or re.match(rf"[{ISSUES}]: \w", row.left), "`left` begins with the issue that it is left to"
    for identity in row.tests:
        path, _, name = identity.partition("::")
        assert name in functions(path), f"{identity} does not exist"
        assert row.number in numbers_in(name, functions(path)[name]), f"{identity} does not say that it is {row.name}"


def test_every_number_that_a_test_names_is_in_the_table() -> None:
    known = {row.number for row in rows()}
    for identity, numbers in named_tests():
        assert numbers <= known, f"{identity} names a report that the table does not have"


def found_in(docstring: str) -> set[str]:
    return set(re.findall(r"\bS\d\d\b", docstring))


def test_what_was_found_since_is_numbered_in_order_and_has_sources() -> None:
    assert [each.name for each in found_since()] == [f"S{number + 1:02}" for number in range(len(found_since()))]
    for each in found_since():
        assert SOURCE.search(each.sources), f"{each.name} has no source"


@pytest.mark.parametrize("row", found_since(), ids=lambda row: row.name)
def test_a_report_found_since_has_a_test_or_a_reason(row: Found) -> None:
    assert row.tests or row.left, f"{row.name} is neither tested nor left with a reason"
    for identity in row.tests:
        path, _, name = identity.partition("::")
        assert name in functions(path), f"{identity} does not exist"
        assert row.name in found_in(functions(path)[name]), f"{identity} does not say that it is {row.name}"


def test_every_report_found_since_that_a_test_names_is_in_the_table_with_that_test() -> None:
    told = {(row.name, identity) for row in found_since() for identity in row.tests}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = str(path.relative_to(ROOT))
        for name, docstring in functions(relative).items():
            for number in found_in(docstring):
                assert (number, f"{relative}::{name}") in told, f"{name} says that it is {number}; the table does not"


def test_the_reading_of_numbers_sees_each_way_of_writing_them() -> None:
    assert numbers_in("test_r07_r13_x", "R01, R22b and R24 c: R5, R100, xR33.") == {1, 7, 13, 22, 24}
