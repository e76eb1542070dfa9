"""`kvcore store`: an operator looks into a store, and finds out what is bad in it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from time import sleep

import pytest

from kvcore.cli import main
from kvcore.config.values import redact_url
from kvcore.keys import ObjectKey
from kvcore.l2.breaker import TRANSITIONS
from kvcore.l2.checks.bed import Bed, CheckFailedError
from kvcore.l2.checks.suite import CHECKS, Verdict, run_check
from kvcore.l2.open import parse_store

URLS = ["file://{0}/kv", "slab://{0}/kv?capacity=1MiB&slab=256KiB", "fs://{0}/kv", "fs://{0}/kv?key_file={0}/key"]
KEYS = [ObjectKey(bytes([number]) * 32, f"model{number % 2}", 0, 0, f"tenant{number}") for number in range(4)]


@pytest.fixture(params=URLS)
def url(request, tmp_path: Path) -> str:
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    found = request.param.format(tmp_path)
    backend = parse_store(found).open_backend()
    payloads = [memoryview(bytes([number]) * 1000) for number in range(4)]
    if hasattr(backend, "find"):
        backend.write(list(zip(KEYS, payloads)))
    else:
        for key, payload in zip(KEYS, payloads):
            backend.write(key, payload)
    backend.close()
    return found


def said(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["store", *arguments])
    return status, capsys.readouterr().out


def test_the_list_names_each_record(url, capsys) -> None:
    status, text = said(capsys, "ls", url)
    assert (status, len(text.splitlines())) == (0, 4)
    assert said(capsys, "ls", url, "--salt", "tenant2")[1].count("\n") == 1


def test_the_figures_are_by_model(url, capsys) -> None:
    status, text = said(capsys, "stat", url)
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()] == ["2", "2", "4"]


def test_verify_finds_nothing_in_a_good_store(url, capsys) -> None:
    assert said(capsys, "verify", url) == (0, "4 good\n")


def test_verify_finds_the_flipped_bit_and_removes_the_record(url, capsys, tmp_path: Path) -> None:
    damage(tmp_path / "kv")
    status, text = said(capsys, "verify", url)
    assert status == 1
    assert "3 good, 1 flipped" in text
    assert said(capsys, "verify", url, "--remove")[0] == 1
    assert said(capsys, "verify", url) == (0, "3 good\n")


def test_verify_tells_of_the_record_that_is_cut_off_whoever_removes_it(url, capsys, tmp_path: Path) -> None:
    """`fs` removed it while it was listed, so that there was nothing to report."""
    [path] = [
        path for path in (tmp_path / "kv").rglob("*") if path.is_file() and bytes([3]) * 1000 in path.read_bytes()
    ]
    os.truncate(path, path.read_bytes().find(bytes([3]) * 1000) + 500)
    status, text = said(capsys, "verify", url)
    assert status == 1
    assert "3 good, 1 torn (removed)" in text
    assert said(capsys, "verify", url) == (0, "3 good\n")


def damage(directory: Path) -> None:
    """Flip a bit in the payload of one record, wherever the store keeps it."""
    for path in sorted(directory.rglob("*")):
        content = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = content.find(bytes([2]) * 1000)
        if at >= 0:
            content[at + 500] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError("no such record")


def test_clear_asks_first_and_deletes_what_was_named(url, capsys) -> None:
    assert main(["store", "clear", url]) == 2
    assert "--yes" in capsys.readouterr().err
    assert said(capsys, "clear", url, "--yes", "--model", "model0") == (0, "2 objects deleted\n")
    assert said(capsys, "clear", url, "--yes") == (0, "2 objects deleted\n")
    assert said(capsys, "ls", url) == (0, "")


def test_the_checks_leave_what_others_have_stored(url, capsys) -> None:
    status, text = said(capsys, "check", url, "--only", "deleted")
    assert status == 0, text
    assert ": 0 of " in text
    assert said(capsys, "verify", url) == (0, "4 good\n")


def test_the_checks_wait_for_a_slow_scan_before_they_clean_up(tmp_path, capsys, monkeypatch) -> None:
    """A shared store lists what its scan has found so far: cleaning up before its end left records behind."""
    from kvcore.l2.fs import FsBackend

    scan = FsBackend.scan

    def slowly(self):
        sleep(0.05)
        yield from scan(self)

    monkeypatch.setattr(FsBackend, "scan", slowly)
    url = f"fs://{tmp_path}/kv"
    assert said(capsys, "check", url, "--only", "restart does not bring back")[0] == 0
    assert said(capsys, "verify", url) == (0, "0 good\n")


def limited(url: str, capacity: str) -> str:
    """The same store, with a limit that is far below what lies there."""
    return re.sub("capacity=[^&]*", f"capacity={capacity}", url) if "capacity" in url else f"{url}&capacity={capacity}"


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "check"])
def test_a_limit_in_the_url_that_is_too_small_costs_no_record(action, url, capsys) -> None:
    """A slab store that was looked at with a smaller capacity dropped what lay beyond it, and said nothing."""
    small = limited(url if "?" in url else f"{url}?quota=1B", "8KiB" if url.startswith("slab") else "1B")
    status, text = said(capsys, action, small, *(["--only", "deleted"] if action == "check" else []))
    assert status == 0, text
    assert said(capsys, "verify", url) == (0, "4 good\n")


@pytest.mark.parametrize("scheme", ["file", "slab", "fs", "nixl+posix"])
@pytest.mark.parametrize("made", [False, True])
def test_a_look_into_a_directory_without_a_store_is_an_error_and_makes_none(scheme, made, tmp_path, capsys) -> None:
    """A mistake in a path was an empty list, a new directory, and room for a whole slab store."""
    directory = tmp_path / "kv"
    if made:
        directory.mkdir()
    url = f"{scheme}://{directory}" + ("?capacity=1MiB&slab=256KiB" if scheme == "slab" else "")
    for words in (["ls"], ["stat"], ["verify"], ["clear", "--yes"]):
        assert main(["store", words[0], url, *words[1:]]) == 1
        assert f"no store in {directory}" in capsys.readouterr().err
    assert [*tmp_path.rglob("*")] == ([directory] if made else [])


@pytest.mark.parametrize(
    ("module", "url"),
    [
        ("redis", "redis://:s3cr3t@127.0.0.1:1/0"),
        ("obstore", "s3://user:s3cr3t@bucket/kv?endpoint=http://127.0.0.1:1&region=x"),
        ("mooncake", "mooncake://127.0.0.1:1"),
    ],
)
def test_a_store_that_is_not_there_is_one_line_that_names_it_without_a_secret(module, url, capsys) -> None:
    pytest.importorskip(module, exc_type=ImportError)
    for action in ("ls", "stat", "verify", "clear", "check"):
        assert main(["store", action, url]) == 1
        captured = capsys.readouterr()
        [line] = captured.err.splitlines()
        assert f"{redact_url(url)} does not answer: " in line
        assert "s3cr3t" not in captured.out + line


@pytest.mark.parametrize("action", ["verify", "clear"])
def test_a_store_that_is_lost_in_the_middle_is_given_up(action, tmp_path, capsys, monkeypatch) -> None:
    """It cost a time-out for each record of the last page: hours."""
    from kvcore.l2.fs import FsBackend

    def lost(self, orders):
        asked.append(len(orders))
        return [TimeoutError("the server did not answer in time")] * len(orders)

    asked: list[int] = []
    url = f"fs://{tmp_path}/kv"
    backend = parse_store(url).open_backend()
    backend.write([(ObjectKey(number.to_bytes(32, "big"), "m", 0), memoryview(b"x")) for number in range(250)])
    backend.close()
    monkeypatch.setattr(FsBackend, "read" if action == "verify" else "delete", lost)
    assert main(["store", action, url, *(["--yes"] if action == "clear" else [])]) == 1
    assert "has failed" in capsys.readouterr().err
    assert asked == ([1] * 10 if action == "verify" else [100])


def test_a_check_that_nobody_has_is_refused(tmp_path, capsys) -> None:
    assert main(["store", "check", f"file://{tmp_path}/kv", "--only", "no such promise"]) == 2


def test_a_broken_promise_is_found_and_named(tmp_path, capsys, monkeypatch) -> None:
    """A store that keeps what was deleted: status 1, and the line says which promise."""
    from kvcore.l2.file import FileBackend

    monkeypatch.setattr(FileBackend, "delete", lambda self, key: None)
    status, text = said(capsys, "check", f"file://{tmp_path}/kv", "--only", "bring back what was deleted")
    assert status == 1
    assert "broken          a restart does not bring back what was deleted: CheckFailedError: found" in text


def test_a_length_that_no_memory_holds_is_a_verdict(tmp_path, capsys, monkeypatch) -> None:
    """A store of others says how long a record is, and may say anything."""
    from kvcore.l2.fs import FsBackend
    from kvcore.l2.shared_backend import Stored

    url = f"fs://{tmp_path}/kv"
    parse_store(url).open_backend().close()
    monkeypatch.setattr(FsBackend, "scan", lambda self: iter([Stored(KEYS[0], "00/record.kv", 1 << 60, None, None)]))
    assert said(capsys, "verify", url) == (1, "could not be read: 00/record.kv\n0 good, 1 could not be read\n")


def test_checks_of_a_store_that_is_lost_in_the_middle_are_given_up(tmp_path, capsys, monkeypatch) -> None:
    """Each of the checks that were left was called broken, at the price of its deadline."""

    async def loses_its_directory(bed: Bed) -> None:
        await bed.open()
        monkeypatch.setattr("kvcore.l2.fs.FsBackend.open", away)
        raise CheckFailedError("because")

    def away(self) -> None:
        raise OSError("the file system is not mounted")

    monkeypatch.setattr("kvcore.l2.command.CHECKS", (loses_its_directory, *CHECKS[:2]))
    assert main(["store", "check", f"fs://{tmp_path}/kv"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "[ 1/3] broken          loses its directory" in captured.out
    assert "does not answer: the file system is not mounted" in captured.err


def test_the_diagram_of_the_breaker_is_its_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    for (state, event), target in TRANSITIONS.items():
        assert f"    {state.value} --> {target.value}: {event.value}\n" in text
    assert text.count(" --> ") == len(TRANSITIONS) + 1


def test_a_check_that_hangs_is_broken_and_not_endless(tmp_path) -> None:
    import asyncio

    async def hangs(bed: Bed) -> None:
        await asyncio.Event().wait()

    async def fails(bed: Bed) -> None:
        raise CheckFailedError("because")

    async def run(check):
        return await run_check(check, _EmptyBed(), 0.05)

    assert asyncio.run(run(hangs)).verdict is Verdict.BROKEN
    assert asyncio.run(run(fails)).text == "CheckFailedError: because"
    assert len(CHECKS) == 50


class _EmptyBed:
    async def clean(self) -> None:
        return None
