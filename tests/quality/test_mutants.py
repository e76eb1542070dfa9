"""The ladder can fail: each planted bug is caught by an oracle that was expected; without it the same climb passes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import failures

sys.path.insert(0, str(Path(__file__).parent))
from mutants import MUTANTS, Mutant

sys.path.pop(0)


def climb(cell: str) -> list[str]:
    return failures(climb_all(LadderOptions(cells=(MatrixCell.parse(cell),))).cells)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_ladder_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A climb with the bug planted fails, and the first finding is of an expected oracle."""
    mutant.plant(monkeypatch)
    found = climb(mutant.cell)
    assert found, f"{mutant.name} went unseen: {mutant.reason}"
    oracle = re.search(r"\[(\w+)\]", found[0])
    assert oracle is not None, found[0]
    assert oracle.group(1) in mutant.oracles, found[0]


@pytest.mark.parametrize("cell", sorted({mutant.cell for mutant in MUTANTS}))
def test_without_a_mutant_the_same_climb_passes(cell: str) -> None:
    """What the mutants are caught by is the bug, not the configuration."""
    assert climb(cell) == []
