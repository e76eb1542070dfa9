"""What docs/peers.md says of LMCache 0.5.6's contract, against the installed LMCache.

Needs an interpreter that has it: `make bench-peers` makes `.venv-peers` and then runs this; KVCORE_PEERS_PYTHON names
another one. Without it everything is skipped in one loud line, and so it is where the environment was begun and not
finished. Few runs are drawn: the differences that the page names are all met by the scenarios.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from kvcore.ladder.conformance.remote import remote_peer
from kvcore.ladder.conformance.search import compare

ENVIRONMENT = Path(__file__).parents[2] / ".venv-peers"
STAMP = ENVIRONMENT / ".kvcore-peers"  # written when torch and LMCache were installed
NAMED = os.environ.get("KVCORE_PEERS_PYTHON")
PYTHON = NAMED or str(ENVIRONMENT / "bin" / "python")
VERSION = "LMCache 0.5.6"


@pytest.fixture(scope="module")
def found():
    if not NAMED and not STAMP.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"{STAMP} is missing: LMCache's contract is not compared", stacklevel=1)
        pytest.skip("no environment with LMCache; `make bench-peers` makes one")
    with remote_peer(PYTHON, "lmcache") as peer:
        assert peer.name == VERSION
        return compare(peer, 50)


@pytest.mark.parametrize(
    ("call", "expected", "said"),
    [
        ("finish_read", "unknown", "SUCCESS"),
        ("finish_read", "expired", "SUCCESS"),
        ("delete", "locked", "SUCCESS"),
        ("finish_write", "busy", "SUCCESS"),
        ("reserve_read", "unknown", "SUCCESS"),
        ("read", "what was written", "something else"),
        ("used", "what is held", "less than is held"),
        ("reserve_read", "reserved", "KEY_NOT_EXIST"),
        ("reserve_write", "reserved", "OUT_OF_MEMORY"),
    ],
)
def test_a_difference_that_the_page_names_is_there(found, call, expected, said):
    assert (call, expected, said) in {(each.call, each.expected, each.said) for each in found.differences}


def test_what_needed_time_was_seen_on_its_own_clock(found):
    timed = [each for each in found.differences if each.on_its_clock is not None]
    assert timed
    assert all(each.on_its_clock for each in timed)


def test_the_words_that_stand_for_two_things(found):
    assert {(each.call, each.word) for each in found.coarse} >= {
        ("finish_write", "SUCCESS"),
        ("reserve_write", "KEY_NOT_WRITABLE"),
        ("finish_read", "KEY_IN_WRONG_STATE"),
    }


def test_the_prefix_rule_differs_by_a_chunk_of_a_window_and_at_a_whole_recurrent_prompt(found):
    whats = {each.what for each in found.prefix}
    assert "serves what the contract does not, recurrent, the whole prompt" in whats
    assert {"keeps more than is read, window", "does not serve what the contract serves, window"} <= whats
    assert not [what for what in whats if "full" in what.split()]


def test_two_writers_leave_one_resident(found):
    """The rule that both keep: no run was found in which a loser changes what is read, unless a copy came late."""
    for each in found.differences:
        if each.call == "read":
            assert [step.move.call for step in each.run].count("end_copy") == 1
