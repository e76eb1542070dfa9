"""Seeds that a long swarm failed on, each with what was wrong."""

from __future__ import annotations

import pytest

from kvcore.keys import ObjectKey
from kvcore.ladder.swarm.draw import draw_case
from kvcore.ladder.swarm.episode import run_case
from kvcore.sim.damage import flip_header

FOUND = {
    1669: "a reaped worker registered again, and the store that told it to was lost",
    5055: "the harness could not damage an empty file",
    5725: "the first store after a restart went over a connection that was gone: the judge allowed for no such store",
    5732: "the same, after a loss of power",
    7993: "the same, with several of them",
    15609: "the same as 10128, in the process of the engine",
    18531: "the same, over the deadline of a copy",
    10128: "a worker's clock jumped over the deadline of its fence, and the worker stopped, as it must",
}

FOUND_BY_SERVER = {
    429: "the harness left a worker without a road to a living server that copied its pages: it waits, as it must",
    463: "the same, behind a partition",
}

FOUND_BY_SILENT_SERVER = {
    (
        "transport",
        117,
    ): "the harness cut a server that copies off for good, as a whole: its workers hold blocks, as they must",
    ("process", 10): "the same, paused for good",
    ("process", 465): "the same",
}


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_failed_once_passes(seed: int) -> None:
    outcome = run_case(draw_case(seed, transfer="worker"))  # as it was drawn when it failed
    assert outcome.findings == [], FOUND[seed]
    assert outcome.bytes_checked > 0


@pytest.mark.parametrize("seed", FOUND_BY_SERVER)
def test_a_seed_that_failed_once_with_servers_that_copy_passes(seed: int) -> None:
    case = draw_case(seed, transfer="server")
    assert not any(target.startswith("worker") for target in case.dead)
    outcome = run_case(case)
    assert outcome.findings == [], FOUND_BY_SERVER[seed]
    assert outcome.marks["server.copied_out"]


@pytest.mark.parametrize(("plane", "seed"), FOUND_BY_SILENT_SERVER)
def test_a_seed_of_one_plane_that_failed_once_with_servers_that_copy_passes(plane: str, seed: int) -> None:
    outcome = run_case(draw_case(seed, planes=[plane], transfer="server"))
    assert outcome.findings == [], FOUND_BY_SILENT_SERVER[plane, seed]


def test_damage_to_an_empty_file_leaves_it_empty() -> None:
    assert flip_header(ObjectKey(b"h" * 32, "m", 0), b"", 7) == b""
