"""Every fault that `docs/store-faults.md` lists has its tests, by their names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
STORES = ROOT / "tests" / "stores"
NAMED = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "store-faults.md").read_text())

NOT_A_FAULT = {
    "test_the_layer_itself_passes_everything_on",  # of the tests' own tool
    "test_closing_with_a_call_under_way_lets_it_end_first",
}


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("module", sorted({module for module, _ in NAMED}))
def test_what_the_page_names_is_a_test(module: str) -> None:
    assert {name for other, name in NAMED if other == module} <= names_in(STORES / module)


def test_every_test_of_a_fault_stands_on_the_page() -> None:
    """Modules of faults whole; of the others, what the page names."""
    for path in STORES.rglob("test_*_faults.py"):
        here = {name for module, name in NAMED if STORES / module == path}
        there = {name for name in names_in(path) if name.startswith("test_")}
        assert there - here - NOT_A_FAULT == set(), path.name
