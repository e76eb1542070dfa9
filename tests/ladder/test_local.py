"""Target `local`: the rungs on the real loop, with real threads, files and sockets - and that they can fail there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import CellResult, Floors, failures
from kvcore.ladder.targets import local
from kvcore.ladder.watched_device import WatchedDevice
from kvcore.ports import Copy, CopyTicket, DeviceEvent

PLAIN = MatrixCell.parse("full/r1/inproc/sync")


def climb(cell: MatrixCell, **options: Any) -> CellResult:
    result = climb_all(LadderOptions(target="local", cells=(cell,), requests=40, **options))
    return result.cells[0]


@pytest.mark.parametrize("cell", local.CELLS, ids=str)
def test_the_cache_changes_no_output_on_real_threads(cell: MatrixCell) -> None:
    result = climb(cell)
    assert failures([result]) == []
    rungs = {rung.rung: rung.counts for rung in result.rungs}
    assert list(rungs) == ["0", "1", "2", "3", "3b", "4", "replay"]
    assert rungs["2"].stores_verified > 0
    assert rungs["3b"].loads_verified > 0
    assert rungs["4"].preemptions > 0
    assert rungs["replay"].tokens_compared == rungs["0"].tokens_compared > 0
    assert result.trace_hash == ""


def test_a_device_that_loses_a_page_of_a_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = WatchedDevice.submit

    def lossy(
        self: WatchedDevice, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()
    ) -> CopyTicket:
        return submit(self, copies[1:] if stream == "load" else copies, stream=stream, after=after)

    monkeypatch.setattr(WatchedDevice, "submit", lossy)
    found = failures([climb(PLAIN)])
    assert any("[bytes]" in line and "wrong KV" in line for line in found)


def test_a_block_written_under_a_running_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding of a compute thread reaches the verdict. (Whether a real race occurs is for the schedule to say.)"""
    monkeypatch.setattr(WatchedDevice, "overwritten", lambda self, blocks: next(iter(blocks), None))
    found = failures([climb(PLAIN)])
    assert any("[blocks]" in line and "which a store still reads" in line for line in found)


def test_an_exception_that_only_the_loop_sees_fails_the_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = local.CacheStack.settle

    async def with_a_stray(self: Any, *arguments: Any) -> None:
        local.asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await settle(self, *arguments)

    monkeypatch.setattr(local.CacheStack, "settle", with_a_stray)
    found = failures([climb(PLAIN)])
    assert any("[loop]" in line and "ZeroDivisionError" in line for line in found)


def test_a_pass_that_does_not_end_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(self: Any, *arguments: Any) -> None:
        await local.asyncio.get_running_loop().create_future()

    monkeypatch.setattr(local.CacheStack, "settle", for_ever)
    monkeypatch.setattr(local, "PASS_SECONDS_MAX", 0.5)
    assert "[liveness] not over after 0.5 s" in failures([climb(PLAIN)])[0]


def test_a_replay_that_found_too_little_is_made_again_and_in_the_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What time decided is mended by the next one; of what is missing for good the last one says so."""
    climbed: list[str] = []
    climb_guarded, floors = local.climb_guarded, local.floors

    async def noted(stage: Any, passes: Sequence[str], seconds_max: float) -> Any:
        climbed.extend(passes)
        return await climb_guarded(stage, passes, seconds_max)

    def more_than_all(requests: int) -> dict[str, Floors]:
        return floors(requests) | {"replay": Floors(requests, hit_share=1.1)}

    monkeypatch.setattr(local, "climb_guarded", noted)
    monkeypatch.setattr(local, "floors", more_than_all)
    (found,) = failures([climb(PLAIN)])
    assert "hit_share is 1, at least 1.1 is needed" in found
    assert climbed[-local.REPLAYS_MAX :] == ["replay"] * local.REPLAYS_MAX
    assert climbed.count("replay") == local.REPLAYS_MAX


def test_the_users_directory_is_used_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[str] = []
    close = local.LocalWorld.close

    def look_and_close(self: Any) -> None:
        records.extend(path.name for path in tmp_path.rglob("*.kv"))
        close(self)

    monkeypatch.setattr(local.LocalWorld, "close", look_and_close)
    arguments = ["--cell", str(PLAIN), "--requests", "40", "--rungs", "0-2", "--l2", str(tmp_path / "l2"), "--json"]
    assert main(["ladder", "--target", "local", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "local"
    assert len(records) > 100
    assert list((tmp_path / "l2").iterdir()) == []
