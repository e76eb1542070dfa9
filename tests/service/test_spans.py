"""Request spans of a real server process, as a collector gets them."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.service.client import ConnectionConfig, LoadCell, SchedulerConfig, StoreCell
from kvcore.service.remote import RemoteConfig, ServerLink

collector_messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

CHUNK = 16
CELL = 4096
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK, CELL),), ranks=1, chunk_tokens=CHUNK)
NAMESPACE = Namespace("tiny", layout=LAYOUT.fingerprint, chunk_tokens=CHUNK)
TOKENS = list(range(2 * CHUNK))
HASHES = ChunkHasher(NAMESPACE).hash_tokens(TOKENS)
PATIENCE_S = 60.0
NS = 60_000_000_000
CONNECTION = ConnectionConfig(request_timeout_ns=NS)
LOOKUP = SchedulerConfig(lookup_timeout_ns=NS, server_timeout_ns=NS)
"""Nothing here is to be late, also on a busy machine."""
Serve = Callable[..., Any]


class Collector:
    """An OTLP collector on loopback: keeps the spans that are posted to it."""

    def __init__(self) -> None:
        self._got = threading.Condition()
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        request = collector_messages.ExportTraceServiceRequest.FromString(body)
        found = [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
        with self._got:
            self.paths.add(path)
            self.spans += found
            self._got.notify_all()

    def wait_for(self, names: set[str]) -> dict[str, Any]:
        with self._got:
            assert self._got.wait_for(lambda: names <= {span.name for span in self.spans}, PATIENCE_S)
            return {span.name: span for span in self.spans}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


async def store_look_up_and_load(address: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        config = RemoteConfig((address,), connection=CONNECTION, lookup=LOOKUP)
        link = ServerLink(asyncio.get_running_loop(), config, NAMESPACE, LAYOUT)
        scheduler, worker = link.scheduler(), link.worker(0)
        try:
            tag = worker.tag(1)
            grants = await worker.reserve_store(tag, [StoreCell(0, found) for found in HASHES], "a-secret-salt")
            assert all(grant is not None for grant in grants)
            assert await worker.commit_store(tag, [True, True]) == [Answer.PUBLISHED] * 2
            scheduler.start("request", 1, HASHES, prompt_tokens=len(TOKENS) + 1, salt="a-secret-salt")
            assert (await scheduler.wait("request", 1)).best == 2
            cells = [LoadCell(0, index, found) for index, found in enumerate(HASHES)]
            await worker.open_read("request", 1, cells)
            assert await worker.close_read("request", 1, cells) == [True, True]
        finally:
            link.close()


def attributes(span: Any) -> dict[str, Any]:
    return {
        pair.key.removeprefix("kvcore."): getattr(pair.value, pair.value.WhichOneof("value"))
        for pair in span.attributes
    }


def test_a_collector_gets_a_span_of_each_kind(serve: Serve, collector: Collector, patient: dict[str, str]) -> None:
    server = serve("--chunk-tokens", str(CHUNK), environ={"KVCORE_LOG_OTLP_ENDPOINT": collector.url, **patient})
    asyncio.run(store_look_up_and_load(server.address))
    found = collector.wait_for({"kvcore.store", "kvcore.lookup", "kvcore.load"})
    assert collector.paths == {"/v1/traces"}
    store, lookup, load = (attributes(found[f"kvcore.{name}"]) for name in ("store", "lookup", "load"))
    assert (store["cells_published"], store["bytes_reserved"], store["outcome"]) == (2, 2 * CELL, "published")
    assert (lookup["chunks_asked"], lookup["chunks_hit"], lookup["cells_l1"], lookup["outcome"]) == (2, 2, 2, "ready")
    assert (load["cells"], load["bytes"], load["outcome"]) == (2, 2 * CELL, "closed")
    assert store["worker"] == load["worker"]
    assert "a-secret-salt" not in str(collector.spans)
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in collector.spans)


def test_what_has_ended_is_sent_at_shutdown(serve: Serve, collector: Collector, patient: dict[str, str]) -> None:
    server = serve("--chunk-tokens", str(CHUNK), environ={"KVCORE_LOG_OTLP_ENDPOINT": collector.url, **patient})
    asyncio.run(store_look_up_and_load(server.address))
    assert server.stop() == 0
    assert {span.name for span in collector.spans} == {"kvcore.store", "kvcore.lookup", "kvcore.load"}


def test_a_collector_that_is_not_there_costs_nothing_but_the_spans(serve: Serve, collector: Collector) -> None:
    collector.close()
    server = serve("--chunk-tokens", str(CHUNK), environ={"KVCORE_LOG_OTLP_ENDPOINT": collector.url})
    asyncio.run(store_look_up_and_load(server.address))
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < PATIENCE_S  # no export is tried for ever


def test_an_endpoint_that_is_none_is_refused_before_anything_starts(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = command("serve", environ={"KVCORE_LOG_OTLP_ENDPOINT": "collector:4318"})
    assert done.returncode == 2
    assert "log.otlp_endpoint" in done.stderr
    assert "Traceback" not in done.stderr
