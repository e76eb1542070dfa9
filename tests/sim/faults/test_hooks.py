"""The hooks through which faults reach blocking work and disks: what they can do, and that they end."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from kvcore.ports import Outcome
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.executor import PARKED, SimExecutor, Work, WorkFault, WorkHook
from kvcore.sim.ports.files import SimFiles

MS = 1_000_000


class Parking(WorkHook):
    def __init__(self, *indices: int) -> None:
        self.indices = indices

    def begins(self, work: Work) -> int:
        return PARKED if work.index in self.indices else 0


def run_work(count: int, meddle: Callable[[SimLoop, SimExecutor], None]) -> list[tuple[int, Outcome[int]]]:
    """Outcomes of `count` pieces of work in the order in which they came, within 10 virtual milliseconds."""
    done: list[tuple[int, Outcome[int]]] = []
    with SimLoop(0) as loop:
        executor = SimExecutor(loop, workers=2, latency_ns=(1000, 2000))
        meddle(loop, executor)

        def deliver(number: int) -> Callable[[Outcome[int]], None]:
            return lambda outcome: done.append((number, outcome))

        for number in range(count):
            executor.submit(lambda number=number: number, deliver(number))  # type: ignore[misc]
        loop.call_later_ns(10 * MS, loop.stop)
        loop.run_forever()
    return done


def test_parked_work_keeps_its_worker_and_is_done_when_it_is_released() -> None:
    def meddle(loop: SimLoop, executor: SimExecutor) -> None:
        executor.hooks.append(Parking(0, 1))
        loop.call_later_ns(5 * MS, executor.release, 1)

    done = run_work(4, meddle)
    assert [number for number, _ in done] == [1, 2, 3], "the first keeps one of the two workers for good"
    assert [outcome.value for _, outcome in done] == [1, 2, 3]


def test_work_that_two_hooks_have_parked_waits_for_both() -> None:
    ended: list[int] = []

    def meddle(loop: SimLoop, executor: SimExecutor) -> None:
        executor.hooks += [Parking(0), Parking(0)]
        loop.call_later_ns(2 * MS, executor.release, 0)
        loop.call_later_ns(4 * MS, executor.release, 0)
        executor.submit(lambda: ended.append(loop.now_ns()), lambda outcome: None)

    run_work(0, meddle)
    assert ended == [4 * MS]


def test_work_that_is_released_with_an_error_is_not_done() -> None:
    def meddle(loop: SimLoop, executor: SimExecutor) -> None:
        executor.hooks.append(Parking(0))
        loop.call_later_ns(MS, executor.release, 0, TimeoutError("gone"))

    ((_, first), (_, second)) = sorted(run_work(2, meddle), key=lambda each: each[0])
    assert isinstance(first.error, TimeoutError)
    assert second.value == 1


def test_the_first_hook_that_names_a_fault_decides() -> None:
    class Fail(WorkHook):
        def ends(self, work: Work) -> WorkFault | None:
            return WorkFault.FAIL_AFTER if work.index == 0 else None

    class Lose(WorkHook):
        def ends(self, work: Work) -> WorkFault | None:
            return WorkFault.SKIP

    done = run_work(3, lambda loop, executor: executor.hooks.extend([Fail(), Lose()]))
    assert [number for number, _ in done] == [0]
    assert isinstance(done[0][1].error, TimeoutError)


def test_a_hook_is_told_what_blocks() -> None:
    seen: list[Work] = []

    class Watch(WorkHook):
        def begins(self, work: Work) -> int:
            seen.append(work)
            return 0

    def blocking() -> None:
        return None

    def meddle(loop: SimLoop, executor: SimExecutor) -> None:
        executor.hooks.append(Watch())
        executor.submit(blocking, lambda outcome: None, 123)

    run_work(0, meddle)
    assert seen == [Work(0, "blocking", 123)]


def test_a_file_hook_fails_operations_until_a_restart_mounts_the_disk_anew() -> None:
    files = SimFiles()
    files.hooks.append(lambda kind, names: errno.EIO if kind == "unlink" else None)
    files.write("a", [b"text"])
    with pytest.raises(OSError, match="Input/output"):
        files.unlink("a")
    assert files.errors_raised == 1
    files.kill()
    files.restart()
    files.unlink("a")
    assert files.names == []


def test_a_write_without_room_leaves_a_part_and_one_that_is_refused_leaves_nothing() -> None:
    for number, left in ((errno.ENOSPC, ["a"]), (errno.EROFS, [])):
        files = SimFiles()
        files.hooks.append(lambda kind, names, number=number: number)  # type: ignore[misc]
        with pytest.raises(OSError, match="a"):
            files.write("a", [b"text"])
        assert files.names == left
        assert files.bytes_stored < 4


def test_a_wiped_disk_has_lost_its_directories_too() -> None:
    files = SimFiles()
    files.mkdir("d")
    files.write("d/a", [b"text"])
    files.wipe()
    with pytest.raises(FileNotFoundError):
        files.write("d/a", [b"text"])
