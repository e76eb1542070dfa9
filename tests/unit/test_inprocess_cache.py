"""`kvcore.Cache`: the cache in ten lines, with real bytes, real files and a real loop thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcore import Cache, CallerError, ConfigError, Namespace

CHUNK_TOKENS = 16
CHUNK_BYTES = 512
TOKENS = list(range(1000, 1000 + 10 * CHUNK_TOKENS + 3))  # ten chunks and a rest
CHUNKS = [bytes([i]) * CHUNK_BYTES for i in range(1, 11)]


def open_cache(directory: Path | None = None, l1_bytes: int = 1 << 20, namespace: Namespace | str = "model") -> Cache:
    return Cache.open(
        namespace=namespace,
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=CHUNK_BYTES,
        l1_bytes=l1_bytes,
        l2=f"file://{directory}" if directory is not None else None,
    )


def test_what_was_stored_is_found_and_read_back() -> None:
    with open_cache() as cache:
        assert cache.lookup(TOKENS) == 0
        assert cache.retrieve(TOKENS) == []
        assert cache.store(TOKENS, CHUNKS) == 10
        assert cache.lookup(TOKENS) == 10 * CHUNK_TOKENS
        assert cache.retrieve(TOKENS) == CHUNKS


def test_a_prompt_that_differs_matches_up_to_the_difference() -> None:
    with open_cache() as cache:
        cache.store(TOKENS, CHUNKS)
        other = [*TOKENS[: 4 * CHUNK_TOKENS + 5], 7, *TOKENS[4 * CHUNK_TOKENS + 6 :]]
        assert cache.lookup(other) == 4 * CHUNK_TOKENS
        assert cache.retrieve(other) == CHUNKS[:4]
        assert cache.lookup(TOKENS[: CHUNK_TOKENS - 1]) == 0


def test_storing_again_changes_nothing() -> None:
    with open_cache() as cache:
        cache.store(TOKENS, CHUNKS)
        assert cache.store(TOKENS, [b"\xff" * CHUNK_BYTES] * 10) == 0
        assert cache.retrieve(TOKENS) == CHUNKS


def test_after_reopening_the_files_still_have_the_chunks(tmp_path: Path) -> None:
    with open_cache(tmp_path / "l2") as cache:
        cache.store(TOKENS, CHUNKS)
        assert cache.flush()
    with open_cache(tmp_path / "l2") as cache:
        assert cache.lookup(TOKENS) == 10 * CHUNK_TOKENS
        assert cache.retrieve(TOKENS) == CHUNKS
        assert cache.statistics().storage.prefetch.loads.loaded == 10, "each was read from its file once"
        assert cache.drop_l1() == 10
        assert cache.retrieve(TOKENS) == CHUNKS


def test_close_writes_back_what_was_stored(tmp_path: Path) -> None:
    with open_cache(tmp_path / "l2") as cache:
        cache.store(TOKENS, CHUNKS)
    with open_cache(tmp_path / "l2") as cache:
        assert cache.retrieve(TOKENS) == CHUNKS


def test_another_model_or_chunk_size_in_the_same_directory_is_a_miss(tmp_path: Path) -> None:
    with open_cache(tmp_path / "l2") as cache:
        cache.store(TOKENS, CHUNKS)
        cache.flush()
    for namespace in ("another", Namespace(model_name="model", model_revision="2")):
        with open_cache(tmp_path / "l2", namespace=namespace) as cache:
            assert cache.lookup(TOKENS) == 0
    with Cache.open(
        namespace="model", chunk_tokens=16, chunk_bytes=256, l1_bytes=1 << 20, l2=f"file://{tmp_path / 'l2'}"
    ) as cache:
        assert cache.lookup(TOKENS) == 0


def test_a_damaged_file_is_a_miss_and_never_wrong_bytes(tmp_path: Path) -> None:
    with open_cache(tmp_path / "l2") as cache:
        cache.store(TOKENS, CHUNKS)
    records = sorted((tmp_path / "l2").glob("*/*.kv"))
    assert len(records) == 10
    for record in records[:3]:
        data = bytearray(record.read_bytes())
        data[-1] ^= 0xFF
        record.write_bytes(data)
    with open_cache(tmp_path / "l2") as cache:
        found = cache.retrieve(TOKENS)
        assert found == CHUNKS[: len(found)]
        assert len(found) < 10


def test_a_host_memory_smaller_than_the_prompt_serves_a_shorter_prefix() -> None:
    with open_cache(l1_bytes=4 * CHUNK_BYTES) as cache:
        cache.store(TOKENS, CHUNKS)
        found = cache.retrieve(TOKENS)
        assert found == CHUNKS[: len(found)]
        statistics = cache.statistics().storage.l1
        assert (statistics.leases, statistics.holds, statistics.objects_staging) == (0, 0, 0)
        assert statistics.evictions > 0


def test_threads_share_a_cache() -> None:
    with open_cache() as cache:

        def work(number: int) -> bool:
            tokens = [number * 1000 + i for i in range(3 * CHUNK_TOKENS)]
            chunks = [bytes([number]) * CHUNK_BYTES] * 3
            cache.store(tokens, chunks)
            return cache.retrieve(tokens) == chunks

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(1, 33)))
        statistics = cache.statistics()
        assert statistics.server.sessions == 0
        assert statistics.storage.l1.leases == 0


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    with open_cache() as cache:
        with pytest.raises(CallerError, match="10 full chunks, but 9 buffers"):
            cache.store(TOKENS, CHUNKS[:9])
        with pytest.raises(CallerError, match="chunk 2 has 3 bytes"):
            cache.store(TOKENS, [*CHUNKS[:2], b"abc", *CHUNKS[3:]])
        with pytest.raises(CallerError):
            cache.lookup([-1] * CHUNK_TOKENS)
        assert cache.lookup(TOKENS) == 0


def test_a_closed_cache_refuses_and_a_second_close_does_nothing() -> None:
    cache = open_cache()
    before = threading.active_count()
    cache.close()
    cache.close()
    assert threading.active_count() < before, "the loop's thread has ended"
    with pytest.raises(CallerError, match="closed"):
        cache.lookup(TOKENS)


def test_a_configuration_that_cannot_work_is_refused_and_leaves_no_thread(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    with pytest.raises(ConfigError, match="two chunks"):
        open_cache(l1_bytes=CHUNK_BYTES)
    with pytest.raises(ConfigError, match="nearest"):
        Cache.open(namespace="m", chunk_bytes=64, l1_bytes=4096, l2="fiel:///x")
    with pytest.raises(ConfigError, match="timeout_s"):
        Cache.open(namespace="m", chunk_bytes=64, l1_bytes=4096, timeout_s=0)
    with open_cache(tmp_path / "l2"), pytest.raises(ConfigError):
        open_cache(tmp_path / "l2")  # the directory is in use
    for thread in {*threading.enumerate()} - before:  # the stores' threads end by themselves: `close` waits for no disk
        thread.join(60)
    assert {*threading.enumerate()} <= before


def test_importing_kvcore_alone_imports_no_part_of_it() -> None:
    code = "import sys, kvcore; print([m for m in sys.modules if m.startswith('kvcore.') or m in ('numpy', 'msgspec')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
