"""The mutation testing tool: what is a mutant, how a sample is drawn, and that no pure module is forgotten."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from __future__ import annotations

Either = int | str


def pick(values: list[int | None], *, last: int | None = None) -> int | None:
    assert len(values) > 1
    return values[0] if values[0] is not last else values[1]
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[dict[str, ModuleType]]:
    pytest.importorskip("cosmic_ray", reason="the dev extra has cosmic-ray")
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts" / "mutation"))
    yield {name: importlib.import_module(name) for name in ("population", "sample", "targets")}
    sys.path[:] = before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "kvcore").mkdir()
    (tmp_path / "kvcore" / "pick.py").write_text(SOURCE)
    return tmp_path


def test_every_pure_module_has_tests_that_judge_it(tool: dict[str, ModuleType]) -> None:
    targets = tool["targets"]
    assert set(targets.TESTS) == set(targets.pure_modules(ROOT))
    for module in targets.TESTS:
        for test in targets.tests_of(module):
            assert (ROOT / test.partition("::")[0]).exists(), f"{module}: {test}"


def test_a_module_without_a_row_stops_the_tool(tool: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match=r"kvcore\.nobody is pure and has no row"):
        tool["targets"].tests_of("kvcore.nobody")


def test_types_are_no_code_and_assertions_are_told_apart(tool: dict[str, ModuleType], root: Path) -> None:
    mutants = tool["population"].mutants_of(root, "kvcore.pick")
    assert mutants
    assert not [mutant for mutant in mutants if "BitOr" in mutant.operator], "`int | None` is a type"
    assert not [mutant for mutant in mutants if "Mul" in mutant.operator], "`*` is no multiplication"
    assert {mutant.line for mutant in mutants if mutant.in_assert} == {8}
    assert {mutant.line for mutant in mutants if not mutant.in_assert} == {9}
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_a_mutant_differs_in_its_place_only(tool: dict[str, ModuleType], root: Path) -> None:
    population = tool["population"]
    for mutant in population.mutants_of(root, "kvcore.pick"):
        changed = population.mutated(root, mutant)
        if changed is not None:
            lines = zip(SOURCE.splitlines(), changed.splitlines(), strict=True)
            assert [number for number, (old, new) in enumerate(lines, 1) if old != new] == [mutant.line]
            removed, added = population.difference(SOURCE, changed)
            assert (removed[0], added[0]) == ("-", "+")


def test_what_the_compiler_warns_of_is_no_mutant(tool: dict[str, ModuleType], root: Path) -> None:
    population = tool["population"]
    (root / "kvcore" / "pick.py").write_text("def three(x):\n    return 3 == x\n")
    made = {
        mutant.operator.rpartition("_")[2]: population.mutated(root, mutant)
        for mutant in population.mutants_of(root, "kvcore.pick")
        if mutant.operator.startswith("ReplaceComparisonOperator")
    }
    assert made["Is"] is None, "`is` with a literal"
    assert made["Lt"] is not None


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 900), min_size=1), st.integers(0, 500))
def test_shares_add_up_and_are_proportional(tool: dict[str, ModuleType], counts: dict[str, int], size: int) -> None:
    shares = tool["sample"].shares(counts, size)
    total = sum(counts.values())
    assert sum(shares.values()) == size
    assert all(abs(shares[name] - size * count / total) < 1 for name, count in counts.items())


def test_a_seed_draws_the_same_sample_and_leaves_out_what_is_excluded(tool: dict[str, ModuleType], root: Path) -> None:
    sample, population = tool["sample"], tool["population"]
    mutants = {"kvcore.pick": population.mutants_of(root, "kvcore.pick")}
    first = sample.draw(root, mutants, 5, 1, set())
    assert [mutant.name for mutant in first] == [mutant.name for mutant in sample.draw(root, mutants, 5, 1, set())]
    assert max(Counter(mutant.name for mutant in first).values()) == 1
    second = sample.draw(root, mutants, 5, 1, {mutant.name for mutant in first})
    assert not {mutant.name for mutant in first} & {mutant.name for mutant in second}


def test_a_sample_can_be_taken_of_some_modules(tool: dict[str, ModuleType]) -> None:
    named, modules = tool["targets"].named, ["kvcore.l1", "kvcore.l1_room", "kvcore.l2.index", "kvcore.l2.ledger"]
    assert named((), modules) == modules
    assert named(("kvcore.l1",), modules) == ["kvcore.l1"]
    assert named(("kvcore.l2", "kvcore.l1_room"), modules) == modules[1:]
    with pytest.raises(SystemExit, match=r"no pure module is called kvcore\.l3, and none lies in it"):
        named(("kvcore.l3",), modules)
