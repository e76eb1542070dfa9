"""The plain ladder, without faults, can fail: a climb catches some bugs of the zoo, and passes without them."""

from __future__ import annotations

import re

import pytest

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import failures
from kvcore.ladder.zoo.catalogue import ZOO
from kvcore.ladder.zoo.planted import planted

CLIMBS = {
    "publish_before_the_copy_has_ended": "full/r1/s1/sync",
    "preemption_without_the_fence": "full/r1/s1/sync",
    "hit_counted_as_ones_in_the_matrix": "full/r1/inproc/sync",
    "last_sampled_token_stored": "full/r1/inproc/sync",
    "minimum_over_servers": "full+window/r1/s2/sync",
    "full_hit_on_a_recurrent_row_kept": "full+window+recurrent/r1/inproc/sync",
}
"""Where each can matter."""


def climb(cell: str) -> list[str]:
    return failures(climb_all(LadderOptions(cells=(MatrixCell.parse(cell),))).cells)


@pytest.mark.parametrize("name", CLIMBS)
def test_the_ladder_catches(name: str) -> None:
    """A climb with the bug planted fails, and the first finding is of an expected oracle."""
    with planted(name):
        found = climb(CLIMBS[name])
    assert found, f"{name} went unseen: {ZOO[name].reason}"
    oracle = re.search(r"\[(\w+)\]", found[0])
    assert oracle is not None, found[0]
    assert oracle.group(1) in ZOO[name].oracles, found[0]


@pytest.mark.parametrize("cell", sorted(set(CLIMBS.values())))
def test_without_a_mutant_the_same_climb_passes(cell: str) -> None:
    """What the mutants are caught by is the bug, not the configuration."""
    assert climb(cell) == []
