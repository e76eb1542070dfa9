"""Spans of lookups, stores and loads: made from what a real storage tells, and from nothing that is secret."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l2.memory import memory_adapter
from kvcore.leases import Owner
from kvcore.memory import PlainArena
from kvcore.operations.spans import SpanTracer, open_spans
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice
from kvcore.storage import Storage, StorageConfig

trace = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

CHUNK = 16
CELL = 64
CHUNKS = 4
SALT = "a-tenants-secret"
HASHES = [bytes([number]) * 32 for number in range(CHUNKS)]
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK, CELL),), ranks=1, chunk_tokens=CHUNK)
KEYS = [ObjectKey(chunk_hash, "m", 0, 0, SALT) for chunk_hash in HASHES]
OWNER = Owner("request-7", 3, "lookup")
WORKER = "worker:worker0-cafe"
FAR_NS = 10_000_000_000
PATIENCE_S = 60.0


class Rig:
    """A storage over a memory store, with its spans kept."""

    def __init__(self, open_max: int = 100, **config: Any) -> None:
        loop = asyncio.get_running_loop()
        self.exporter = memory.InMemorySpanExporter()
        provider = trace.TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(export.SimpleSpanProcessor(self.exporter))
        self.tracer = SpanTracer(provider.get_tracer("test"), open_max)
        self.clock = SystemClock()
        self.executor = ThreadExecutor(loop, 1)
        adapter = memory_adapter("m", executor=self.executor, notice_factory=lambda: EventfdNotice(loop))
        self.storage = Storage(
            layout=LAYOUT,
            model_name="m",
            l1=L1Cache(PlainArena(1 << 16), LruPolicy),
            adapters=[adapter],
            clock=self.clock,
            config=StorageConfig(**config),
            tracer=self.tracer,
        )

    def spans(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, attributes without the prefix) of what has ended."""
        return [
            (span.name, {name.removeprefix("kvcore."): value for name, value in span.attributes.items()})
            for span in self.exporter.get_finished_spans()
        ]

    def events(self, number: int = 0) -> list[str]:
        return [event.name for event in self.exporter.get_finished_spans()[number].events]

    def store(self, tag: str = "tag") -> None:
        self.storage.reserve_store(tag, WORKER, KEYS, CELL)
        self.storage.commit_store(tag, WORKER, KEYS)

    def lookup(self, owner: Owner = OWNER, deadline_ns: int = FAR_NS) -> Any:
        return self.storage.start_lookup(
            owner,
            HASHES,
            salt=SALT,
            prompt_tokens=CHUNKS * CHUNK + 1,
            masks=[(1 << CHUNKS) - 1],
            skip_chunks=0,
            deadline_ns=self.clock.now_ns() + deadline_ns,
        )


def play(scenario: Callable[[Rig], Coroutine[Any, Any, None]], **given: Any) -> Rig:
    async def main() -> Rig:
        async with asyncio.timeout(PATIENCE_S):
            rig = Rig(**given)
            try:
                await scenario(rig)
            finally:
                await rig.storage.close()
                rig.executor.close()
            return rig

    return asyncio.run(main())


def test_a_store_is_one_span_from_reservation_to_publication() -> None:
    async def scenario(rig: Rig) -> None:
        rig.storage.reserve_store("tag", WORKER, KEYS, CELL)
        rig.storage.commit_store("tag", WORKER, KEYS[:3])
        assert rig.spans() == []
        rig.storage.abort_store("tag", WORKER, KEYS[3:])

    assert play(scenario).spans() == [
        (
            "kvcore.store",
            {
                "worker": "worker0-cafe",
                "tag": "tag",
                "cells_asked": 4,
                "cells_reserved": 4,
                "bytes_reserved": 4 * CELL,
                "cells_published": 3,
                "cells_aborted": 1,
                "outcome": "published",
            },
        )
    ]


def test_a_store_that_publishes_nothing_is_aborted() -> None:
    async def scenario(rig: Rig) -> None:
        rig.storage.reserve_store("tag", WORKER, KEYS, CELL)
        rig.storage.abort_store("tag", WORKER, KEYS)

    ((_, found),) = play(scenario).spans()
    assert (found["outcome"], found["cells_published"], found["cells_aborted"]) == ("aborted", 0, 4)


def test_a_lookup_tells_what_came_from_where() -> None:
    """Two chunks are in L1, two come from the store."""

    async def scenario(rig: Rig) -> None:
        rig.store()
        assert await rig.storage.drain()
        rig.storage.drop_l1()
        rig.storage.reserve_store("again", WORKER, KEYS[:2], CELL)
        rig.storage.commit_store("again", WORKER, KEYS[:2])
        rig.exporter.clear()
        await rig.lookup().wait()

    rig = play(scenario)
    ((name, found),) = rig.spans()
    assert name == "kvcore.lookup"
    assert found == {
        "session": "request-7",
        "generation": 3,
        "chunks_asked": 4,
        "cells_asked": 4,
        "cells_l1": 2,
        "cells_l2": 2,
        "cells_lost": 0,
        "bytes_loaded": 2 * CELL,
        "chunks_hit": 4,
        "outcome": "ready",
    }
    assert rig.events() == ["plan", "loaded"]


def test_a_lookup_without_a_store_behind_is_answered_at_once() -> None:
    async def scenario(rig: Rig) -> None:
        rig.store()
        rig.exporter.clear()
        await rig.lookup().wait()

    ((_, found),) = play(scenario).spans()
    assert (found["chunks_hit"], found["cells_l1"], found["cells_l2"], found["bytes_loaded"]) == (4, 4, 0, 0)


def test_a_lookup_that_waits_for_the_budget_says_so() -> None:
    """The budget holds one lookup's bytes: the second one stands in line."""

    async def scenario(rig: Rig) -> None:
        rig.store()
        assert await rig.storage.drain()
        rig.storage.drop_l1()
        rig.exporter.clear()
        first = rig.lookup()
        second = rig.storage.start_lookup(
            Owner("second", 1, "lookup"),
            [bytes([99]) * 32],
            salt=SALT,
            prompt_tokens=CHUNK + 1,
            masks=[1],
            skip_chunks=0,
            deadline_ns=rig.clock.now_ns() + FAR_NS,
        )
        await first.wait()
        first.cancel()
        await second.wait()

    rig = play(scenario, prefetch_budget_bytes=CHUNKS * CELL)
    names = [found["session"] for _, found in rig.spans()]
    assert "wait for budget" in rig.events(names.index("second"))
    assert "wait for budget" not in rig.events(names.index("request-7"))


def test_a_lookup_past_its_deadline_and_one_that_is_given_up_and_one_that_is_hurried() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.lookup(deadline_ns=0).wait()
        rig.storage.release_owner(OWNER)
        job = rig.lookup(Owner("given up", 1, "lookup"))
        job.cancel()
        await job.wait()
        job = rig.lookup(Owner("hurried", 1, "lookup"))
        job.hurry()
        await job.wait()

    late, given_up, hurried = (found for _, found in play(scenario).spans())
    assert (late["outcome"], late["chunks_hit"]) == ("deadline", 0)
    assert (given_up["outcome"], given_up["reason"]) == ("failed", "cancelled")
    assert (hurried["outcome"], hurried["chunks_hit"]) == ("hurry", 0)


def test_a_load_is_one_span_until_its_last_cell_is_closed() -> None:
    async def scenario(rig: Rig) -> None:
        rig.store()
        await rig.lookup().wait()
        rig.exporter.clear()
        rig.storage.open_read(WORKER, OWNER, KEYS[:1])
        rig.storage.open_read(WORKER, OWNER, KEYS[1:])
        rig.storage.close_read(WORKER, OWNER, KEYS[1:])
        assert rig.spans() == []
        rig.storage.close_read(WORKER, OWNER, KEYS[:1])

    assert play(scenario).spans() == [
        (
            "kvcore.load",
            {
                "worker": "worker0-cafe",
                "session": "request-7",
                "generation": 3,
                "cells": 4,
                "bytes": 4 * CELL,
                "outcome": "closed",
            },
        )
    ]


def test_the_death_of_a_worker_ends_its_spans() -> None:
    async def scenario(rig: Rig) -> None:
        rig.store()
        await rig.lookup().wait()
        rig.exporter.clear()
        rig.storage.open_read(WORKER, OWNER, KEYS)
        rig.storage.reserve_store("last", WORKER, [ObjectKey(b"new", "m", 0)], CELL)
        rig.storage.release_holder(WORKER)
        assert rig.tracer.open_spans == 0

    assert sorted((name, found["outcome"]) for name, found in play(scenario).spans()) == [
        ("kvcore.load", "dropped"),
        ("kvcore.store", "aborted"),
    ]


def test_no_span_holds_a_salt_or_a_hash() -> None:
    async def scenario(rig: Rig) -> None:
        rig.store()
        assert await rig.storage.drain()
        rig.storage.drop_l1()
        await rig.lookup().wait()
        rig.storage.open_read(WORKER, OWNER, KEYS)
        rig.storage.close_read(WORKER, OWNER, KEYS)

    rig = play(scenario)
    assert len(rig.spans()) == 3
    told = "".join(span.to_json() for span in rig.exporter.get_finished_spans())
    assert SALT not in told
    assert all(chunk_hash.hex() not in told and repr(chunk_hash) not in told for chunk_hash in HASHES)


def test_spans_that_nobody_ends_are_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        for number in range(5):
            rig.storage.reserve_store(f"tag{number}", WORKER, [ObjectKey(bytes([number]), "m", 0)], CELL)
        assert rig.tracer.open_spans == 3
        for number in range(5):
            rig.storage.abort_store(f"tag{number}", WORKER, [ObjectKey(bytes([number]), "m", 0)])

    found = [(found["tag"], found["outcome"]) for _, found in play(scenario, open_max=3).spans()]
    assert found[:2] == [("tag0", "lost"), ("tag1", "lost")]
    assert len(found) == 5


def test_a_tracer_that_raises_ends_the_tracing_and_not_the_request(caplog: pytest.LogCaptureFixture) -> None:
    class Raises:
        def start_span(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("exporter bug")

    async def with_bug(rig: Rig) -> None:
        rig.tracer._tracer = Raises()  # type: ignore[assignment]
        rig.store()
        job = rig.lookup()
        await job.wait()
        assert job.leases == CHUNKS

    assert play(with_bug).spans() == []
    assert caplog.text.count("tracing has stopped") == 1


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://host", "http://", "http://[::1", "http://host:0"])
def test_an_endpoint_that_is_none_is_refused(loop: asyncio.AbstractEventLoop, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"log\.otlp_endpoint"):
        open_spans(loop, endpoint)


def test_without_the_packages_the_extra_is_named(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refusing(name: str, *given: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(ConfigError, match=r"pip install 'kvcore\[otel\]'"):
        open_spans(loop, "http://127.0.0.1:4318")
