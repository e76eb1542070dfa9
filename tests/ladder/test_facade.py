"""The in-process `Cache` as a small ladder of its own, and shared memory under a climb on real threads."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from kvcore import Cache
from kvcore.cli import main
from kvcore.errors import CallerError, ConfigError
from kvcore.ladder.configure import configure
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.stack import StackConfig
from kvcore.ladder.targets import local
from kvcore.runtime.shared_memory import SharedArena
from kvcore.sim.model import FingerprintModel
from kvcore.sim.workload import Workload, load_workload

pytestmark = pytest.mark.ladder

CHUNK_TOKENS = 16
CHUNK_BYTES = 4096


def value(tokens: Any) -> bytes:
    """The bytes of a chunk: a function of all tokens up to its end."""
    return blake3(np.asarray(tokens, dtype="<u4").tobytes()).digest(length=CHUNK_BYTES)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(None, 3, requests=40, chunk_tokens=CHUNK_TOKENS)


class FacadeLadder:
    """Stores and reads back every prompt of a workload, and compares every byte."""

    def __init__(self, workload: Workload, where: Path) -> None:
        self.prompts = [spec.prompt for spec in workload.requests]
        self.where = where
        self.truth: dict[tuple[int, ...], bytes] = {}
        for prompt in self.prompts:
            for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS):
                self.truth[prompt[:end]] = value(prompt[:end])

    def open(self, l1_chunks: int, options: str = "") -> Cache:
        url = f"file://{self.where}{options}"
        return Cache.open(
            namespace="facade", chunk_tokens=CHUNK_TOKENS, chunk_bytes=CHUNK_BYTES,
            l1_bytes=l1_chunks * CHUNK_BYTES, l2=url,
        )  # fmt: skip

    def chunks(self, prompt: tuple[int, ...]) -> list[bytes]:
        return [self.truth[prompt[:end]] for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS)]

    def store_all(self, cache: Cache) -> int:
        return sum(cache.store(prompt, self.chunks(prompt)) for prompt in self.prompts)

    def read_all(self, cache: Cache) -> tuple[int, int]:
        """(chunks that came back, chunks there are); each of those that came is compared."""
        found = wanted = 0
        for prompt in self.prompts:
            expected = self.chunks(prompt)
            got = cache.retrieve(prompt)
            assert got == expected[: len(got)]
            found += len(got)
            wanted += len(expected)
        return found, wanted


@pytest.fixture
def facade(workload: Workload, tmp_path: Path) -> FacadeLadder:
    return FacadeLadder(workload, tmp_path / "l2")


def test_the_facade_gives_every_byte_back_cold_hot_and_reopened(facade: FacadeLadder) -> None:
    with facade.open(2 * len(facade.truth)) as cache:
        assert facade.read_all(cache)[0] == 0
        assert facade.store_all(cache) == len(facade.truth)
        assert facade.store_all(cache) == 0
        found, wanted = facade.read_all(cache)
        assert found == wanted
        assert cache.lookup(facade.prompts[0]) == len(facade.prompts[0]) // CHUNK_TOKENS * CHUNK_TOKENS
        assert cache.flush()
        assert cache.drop_l1() == len(facade.truth)
        assert facade.read_all(cache) == (wanted, wanted)
        assert cache.statistics().storage.prefetch.cells_found > 0
    with facade.open(2 * len(facade.truth)) as cache:
        assert facade.read_all(cache) == (wanted, wanted)
    with pytest.raises(CallerError, match="closed"):
        cache.lookup([1, 2])
    cache.close()


def test_the_facade_with_little_memory_and_a_small_directory_gives_right_bytes(facade: FacadeLadder) -> None:
    """Most of what is stored is evicted from both tiers; what comes back is right."""
    with facade.open(24, f"?capacity={len(facade.truth) * CHUNK_BYTES // 3}&name=small") as cache:
        facade.store_all(cache)
        assert cache.flush()
        found, wanted = facade.read_all(cache)
        assert 0 < found < wanted
        assert cache.statistics().storage.l1.evictions > 0
    assert sum(path.stat().st_size for path in facade.where.rglob("*.kv")) <= len(facade.truth) * CHUNK_BYTES // 3


def test_damaged_files_make_the_answer_shorter(facade: FacadeLadder) -> None:
    with facade.open(2 * len(facade.truth)) as cache:
        facade.store_all(cache)
        assert cache.flush()
    records = sorted(facade.where.rglob("*.kv"))
    for index, record in enumerate(records[::7]):
        data = bytearray(record.read_bytes())
        data[index % len(data)] ^= 1
        record.write_bytes((data, data[: len(data) // 2], data + b"!")[index % 3])
    records[1].unlink()
    with facade.open(2 * len(facade.truth)) as cache:
        found, wanted = facade.read_all(cache)
        assert 0 < found < wanted
        assert facade.store_all(cache) > 0
        assert facade.read_all(cache) == (wanted, wanted)


def test_threads_that_share_a_facade_read_right_bytes(facade: FacadeLadder) -> None:
    wrong: list[BaseException] = []

    def reader(cache: Cache) -> None:
        try:
            facade.store_all(cache)
            facade.read_all(cache)
        except BaseException as error:
            wrong.append(error)

    with facade.open(48) as cache:
        threads = [threading.Thread(target=reader, args=(cache,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:relative", "absolute path"),
        ("files:///tmp/kv", "nearest one is 'file'"),
        ("/tmp/kv", "URL with a scheme"),
        ("memory:?capacity=1.5GiB", "not a size"),
        ("memory:?capacity=1XB", "unit of size"),
        ("memory:?capacitee=1GiB", "nearest one is 'capacity'"),
        ("memory:?capacity=", "no value"),
        ("memory:?name=a&name=b", "given twice"),
        ("memory://host", "no host"),
        ("file:///", "directory of its own"),
        ("file:///dev/null/kv?fsync=maybe", "write true or false"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_in_one_line(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Cache.open(namespace="facade", chunk_tokens=4, chunk_bytes=64, l1_bytes=1024, l2=url)
    assert "\n" not in str(refused.value)


def test_a_directory_that_is_somebody_elses_is_refused_and_left_alone(tmp_path: Path) -> None:
    def opened(name: str) -> Cache:
        url = f"file://{tmp_path / name}"
        return Cache.open(namespace="facade", chunk_tokens=4, chunk_bytes=64, l1_bytes=1024, l2=url)

    for name, file, text in (("letters", "letter.txt", "dear"), ("others", "kvcore-l2.json", '{"format": "other"}')):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / file).write_text(text)
    with pytest.raises(ConfigError, match=r"files that are not ours, such as 'letter\.txt'"):
        opened("letters")
    with pytest.raises(ConfigError, match="another format"):
        opened("others")
    with opened("mine") as cache:
        cache.store([1, 2, 3, 4], [bytes(64)])
        assert cache.flush()
        with pytest.raises(ConfigError, match="held by another"):
            opened("mine")
        assert cache.lookup([1, 2, 3, 4]) == 4
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("tokens", [[1, 2, -1, 4], [1, 2, True, 4], [1, 2, 1 << 32, 4], [1, 2, 3.0, 4], "abcd", None])
def test_what_is_no_token_is_refused_and_the_cache_goes_on(tokens: Any) -> None:
    good: Any = np.arange(4, dtype=np.int64)
    with Cache.open(namespace="facade", chunk_tokens=4, chunk_bytes=64, l1_bytes=1024) as cache:
        cache.store(good, [b"k" * 64])
        with pytest.raises(CallerError):
            cache.store(tokens, [b"w" * 64])
        with pytest.raises(CallerError):
            cache.retrieve(tokens)
        with pytest.raises(CallerError, match="not 64"):
            cache.store([9, 9, 9, 9], [b"short"])
        with pytest.raises(CallerError):
            cache.lookup(good - 1)
        assert cache.retrieve(list(range(4))) == [b"k" * 64]


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> list[StackConfig]:
    """Target local builds its servers on POSIX shared memory; the configurations it was built with."""
    built: list[StackConfig] = []

    def shared(cell: MatrixCell, options: LadderOptions, l2: Any = None) -> tuple[StackConfig, FingerprintModel]:
        config, model = configure(cell, options, l2)
        built.append(replace(config, shared_memory=True))
        return built[-1], model

    monkeypatch.setattr(local, "configure", shared)
    return built


@pytest.mark.parametrize("cell", ["full+window+recurrent/r2/s2/sync", "full+window+recurrent/r1/inproc/async"])
def test_workers_that_map_the_servers_memory_change_no_output(
    shared_memory: list[StackConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    segments = segments_made(monkeypatch)
    code = main(["ladder", "--target", "local", "--cell", cell, "--requests", "40", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["verdict"], [rung["problems"] for rung in result["rungs"]]) == (0, "pass", [[]] * 6)
    assert len(shared_memory) == 1
    assert len(segments) >= 1
    assert [name for name in segments if Path("/dev/shm", name).exists()] == []


def segments_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the segments that this process makes from now on; others on the machine have theirs."""
    made: list[str] = []
    init = SharedArena.__init__

    def noted(arena: SharedArena, *named: Any, **more: Any) -> None:
        init(arena, *named, **more)
        made.append(arena.segment)

    monkeypatch.setattr(SharedArena, "__init__", noted)
    return made
