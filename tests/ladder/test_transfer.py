"""Rungs 0 to 4 with servers that copy by themselves: no output changes, and the climb finds it when one does.

The mutants here are caught by a climb; those of the zoo (`kvcore.ladder.zoo.pages`) by the swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.cli import main
from kvcore.connectors.worker import WorkerConnector
from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import LadderResult
from kvcore.service.page_client import PageClient
from kvcore.service.page_desk import PageDesk

pytestmark = pytest.mark.ladder

REQUESTS = 50


def climb(cell: str, **more: Any) -> LadderResult:
    options = LadderOptions(requests=REQUESTS, cells=(MatrixCell.parse(cell),), transfer="server", **more)
    return climb_all(options)


@pytest.mark.parametrize(
    "cell", ["full/r1/inproc/async", "full+window/r2/s2/sync", "full+window+recurrent/r1/s1/async"]
)
def test_servers_that_copy_change_no_output(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"store": 0, "load": 0}
    count_calls(monkeypatch, asked)
    result = climb(cell)
    assert result.verdict == "pass", [rung.problems for rung in result.cells[0].rungs]
    rungs = {rung.rung: rung.counts for rung in result.cells[0].rungs}
    assert rungs["4"].fences_waited > 0
    assert rungs["4"].stores_cancelled > 0
    assert min(asked.values()) > REQUESTS, "nobody else has copied"
    assert "--transfer server" in result.cells[0].reproduce


def count_calls(monkeypatch: pytest.MonkeyPatch, asked: dict[str, int]) -> None:
    for name in asked:
        original: Callable[..., Any] = getattr(PageClient, name)

        def counting(
            self: PageClient, *arguments: Any, name: str = name, original: Callable[..., Any] = original
        ) -> Any:
            asked[name] += 1
            return original(self, *arguments)

        monkeypatch.setattr(PageClient, name, counting)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (climb("full/r1/s1/sync").trace_hash for _ in range(2))
    assert first == second


# -- planted bugs


def problems(cell: str = "full+window/r1/s1/sync") -> str:
    result = climb(cell)
    assert result.verdict == "fail", "a planted bug was not found"
    return " ".join(problem for rung in result.cells[0].rungs for problem in rung.problems)


def test_a_server_that_publishes_before_its_copy_has_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PageDesk._begin

    def hasty(self: PageDesk, transfer: Any, keys: Sequence[Any], slots: Sequence[Any], parts: Sequence[Any]) -> Any:
        if transfer.owner is None:
            granted = [key for key, slot in zip(keys, slots) if slot is not None]
            self._storage.commit_store(transfer.tag, transfer.holder, granted)
        return begin(self, transfer, keys, slots, parts)

    monkeypatch.setattr(PageDesk, "_begin", hasty)
    assert "[bytes]" in problems()


def test_a_fence_that_does_not_wait_for_the_servers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fence = WorkerConnector.fence

    def hasty(self: WorkerConnector, meta: Any) -> None:
        waiting = fence(self, meta)
        if waiting is not None:
            waiting.close()  # type: ignore[attr-defined]

    monkeypatch.setattr(WorkerConnector, "fence", hasty)
    assert "[bytes]" in problems()


def test_a_cell_that_is_done_when_the_server_has_begun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PageClient._take

    def trusting(self: PageClient, batch: Any, reply: Any, cancelled: int) -> None:
        answers = [Answer.RELEASED if answer is Answer.RESERVED else answer for answer in reply.answers]
        take(self, batch, type(reply)(b"", answers), cancelled)

    monkeypatch.setattr(PageClient, "_take", trusting)
    found = problems()
    assert "[bytes]" in found or "[output]" in found


def test_a_cancelled_cell_that_is_published_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are somebody else's by the time they are read."""
    copies = PageDesk.copies

    def deaf(self: PageDesk, worker: str, tag: str, cancel: int) -> Any:
        told = copies(self, worker, tag, 0)
        if told is None:
            return None
        running = int.from_bytes(told.running, "little") & ~cancel
        return type(told)(running.to_bytes(1 + running.bit_length() // 8, "little"), told.answers)

    monkeypatch.setattr(PageDesk, "copies", deaf)
    assert "[bytes]" in problems()


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--transfer", "both"), "takes worker or server, not 'both'"),
        (("--transfer", "server", "--connector", "a:B"), "kvcore's own workers and servers"),
        (("--transfer", "server", "--rungs", "5-8"), "on the rungs 0 to 4"),
    ],
)
def test_a_transfer_that_nobody_would_look_at_is_refused(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ladder", *arguments]) == 2
    assert why in capsys.readouterr().err
