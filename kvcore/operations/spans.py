"""One OpenTelemetry span per lookup, store and load, made from the events of the `Tracer` port.

Theory of operation
-------------------
The core tells what happens as labelled events (`kvcore.ports.Tracer`). `SpanTracer` keeps the spans that are open, by
the names that the events carry, and turns further events into attributes and events of the span:

    kvcore.lookup   prefetch.begin -> wait -> plan -> loaded ... -> ready | failed    (deadline, then ready: too late)
    kvcore.store    store.begin -> commit, abort ... -> end
    kvcore.load     read.begin ... -> read.end of the last cell, or read.drop: the worker died

1. A span names its session or worker and counts cells, chunks and bytes. Neither salts nor tokens nor hashes are in
   the events, so they cannot be in a span.
2. On the loop a span only costs its record. The SDK's own thread sends finished ones in batches, over OTLP/HTTP; its
   queue is bounded, and what does not fit is dropped. A collector that does not answer costs spans, never a request.
3. At most `open_max` spans are open; beyond that the oldest is ended as lost.
4. Whatever OpenTelemetry raises ends the tracing (logged once), not the request.

`open_spans` makes the exporter; without the packages it says which extra is missing. `SpanExport.close` sends what is
left, within a bounded time, in a thread of the runtime's executor.

Who holds: this object the open spans, the SDK the finished ones. Who announces: the core's events. Who frees: the event
that ends the span, `close` of the export for the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvcore.errors import ConfigError
from kvcore.ports import Outcome
from kvcore.runtime.executor import ThreadExecutor

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.trace import Tracer as OtelTracer

_OPEN_MAX = 65_536
_QUEUE_MAX = 8192
_BATCH_MAX = 2048
_DELAY_MS = 1000.0
_EXPORT_S = 2.0
_CLOSE_S = 1.0
_PATH = "/v1/traces"
_WORKER = "worker:"
_log = logging.getLogger("kvcore.spans")

Field = str | int | bytes


class _Open:
    """A span that has begun, and what is counted until it ends. `outcome`: of a lookup that will be answered."""

    __slots__ = ("counts", "outcome", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.counts: dict[str, int] = {}
        self.outcome = "ready"

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def end(self, **attributes: Field) -> None:
        for name, value in (*self.counts.items(), *attributes.items()):
            self.span.set_attribute(f"kvcore.{name}", value)
        self.span.end()


class SpanTracer:
    """`kvcore.ports.Tracer` on an OpenTelemetry tracer. See the module text. Loop-confined."""

    def __init__(self, tracer: OtelTracer, open_max: int = _OPEN_MAX) -> None:
        assert open_max > 0
        self._tracer = tracer
        self._open_max = open_max
        self._open: dict[tuple[Field, ...], _Open] = {}
        self._handlers: dict[str, Callable[..., None]] = {
            "prefetch.begin": self._lookup_begin,
            "prefetch.wait": self._lookup_wait,
            "prefetch.plan": self._lookup_plan,
            "prefetch.loaded": self._lookup_loaded,
            "prefetch.deadline": self._lookup_deadline,
            "prefetch.hurry": self._lookup_hurry,
            "prefetch.ready": self._lookup_ready,
            "prefetch.failed": self._lookup_failed,
            "store.begin": self._store_begin,
            "store.commit": self._store_commit,
            "store.abort": self._store_abort,
            "store.end": self._store_end,
            "read.begin": self._load_begin,
            "read.end": self._load_end,
            "read.drop": self._load_drop,
        }

    @property
    def open_spans(self) -> int:
        return len(self._open)

    def event(self, label: str, *fields: Field) -> None:
        handler = self._handlers.get(label)
        if handler is None:
            return
        try:
            handler(*fields)
        except Exception as error:  # somebody else's code, and the request goes on
            self._handlers = {}
            self._open.clear()
            _log.error("tracing has stopped: OpenTelemetry raised", exc_info=error)

    def _begin(self, name: str, *key: Field, **attributes: Field) -> _Open:
        given = {f"kvcore.{attribute}": value for attribute, value in attributes.items()}
        made = self._open[(name, *key)] = _Open(self._tracer.start_span(f"kvcore.{name}", attributes=given))
        if len(self._open) > self._open_max:
            self._open.pop(next(iter(self._open))).end(outcome="lost")
        return made

    # --- lookups: by session and generation

    def _lookup_begin(self, session: str, generation: int, chunks: int, cells: int, cells_l1: int) -> None:
        made = self._begin(
            "lookup",
            session,
            generation,
            session=session,
            generation=generation,
            chunks_asked=chunks,
            cells_asked=cells,
            cells_l1=cells_l1,
        )
        made.add(cells_l2=0, cells_lost=0, bytes_loaded=0)

    def _lookup_wait(self, session: str, generation: int, wanted: int) -> None:
        self._note("wait for budget", session, generation, bytes_wanted=wanted)

    def _lookup_plan(self, session: str, generation: int, chunks: int, load_bytes: int) -> None:
        self._note("plan", session, generation, chunks=chunks, bytes=load_bytes)

    def _lookup_loaded(self, session: str, generation: int, arrived: int, lost: int, loaded: int) -> None:
        found = self._open.get(("lookup", session, generation))
        if found is not None:
            found.add(cells_l2=arrived, cells_lost=lost, bytes_loaded=loaded)
        self._note("loaded", session, generation, cells=arrived, lost=lost, bytes=loaded)

    def _lookup_deadline(self, session: str, generation: int, phase: str) -> None:
        self._cut_short("deadline", session, generation, phase)

    def _lookup_hurry(self, session: str, generation: int, phase: str) -> None:
        self._cut_short("hurry", session, generation, phase)

    def _cut_short(self, why: str, session: str, generation: int, phase: str) -> None:
        found = self._open.get(("lookup", session, generation))
        if found is not None:
            found.outcome = why
        self._note(why, session, generation, phase=phase)

    def _lookup_ready(self, session: str, generation: int, chunks: int) -> None:
        found = self._open.pop(("lookup", session, generation), None)
        if found is not None:
            found.end(chunks_hit=chunks, outcome=found.outcome)

    def _lookup_failed(self, session: str, generation: int, reason: str) -> None:
        found = self._open.pop(("lookup", session, generation), None)
        if found is not None:
            found.end(chunks_hit=0, outcome="failed", reason=reason)

    def _note(self, what: str, session: str, generation: int, **attributes: Field) -> None:
        found = self._open.get(("lookup", session, generation))
        if found is not None:
            found.span.add_event(what, {f"kvcore.{name}": value for name, value in attributes.items()})

    # --- stores: by worker and tag

    def _store_begin(self, holder: str, tag: str, cells: int, reserved: int, reserved_bytes: int) -> None:
        found = self._open.get(("store", holder, tag))
        if found is None:
            found = self._begin("store", holder, tag, worker=_worker(holder), tag=tag)
            found.add(cells_published=0, cells_aborted=0)
        found.add(cells_asked=cells, cells_reserved=reserved, bytes_reserved=reserved_bytes)

    def _store_commit(self, holder: str, tag: str, published: int) -> None:
        found = self._open.get(("store", holder, tag))
        if found is not None:
            found.add(cells_published=published)

    def _store_abort(self, holder: str, tag: str, aborted: int) -> None:
        found = self._open.get(("store", holder, tag))
        if found is not None:
            found.add(cells_aborted=aborted)

    def _store_end(self, holder: str, tag: str) -> None:
        found = self._open.pop(("store", holder, tag), None)
        if found is not None:
            published = found.counts["cells_published"]
            found.end(outcome="published" if published else "aborted")

    # --- loads: by worker, session and generation

    def _load_begin(self, holder: str, session: str, generation: int, cells: int, cells_bytes: int) -> None:
        found = self._open.get(("load", holder, session, generation))
        if found is None:
            found = self._begin(
                "load", holder, session, generation, worker=_worker(holder), session=session, generation=generation
            )
        found.add(cells=cells, bytes=cells_bytes, open=cells)

    def _load_end(self, holder: str, session: str, generation: int, cells: int, cells_bytes: int) -> None:
        key = ("load", holder, session, generation)
        found = self._open.get(key)
        if found is None:
            return
        found.add(open=-cells)
        if found.counts["open"] <= 0:
            self._close_load(key, "closed")

    def _load_drop(self, holder: str) -> None:
        for key in [key for key in self._open if key[:2] == ("load", holder)]:
            self._close_load(key, "dropped")

    def _close_load(self, key: tuple[Field, ...], outcome: str) -> None:
        found = self._open.pop(key)
        found.counts.pop("open")
        found.end(outcome=outcome)


class SpanExport:
    """A `SpanTracer` whose spans go to a collector. Made by `open_spans`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: str) -> None:
        provider = _provider(endpoint)
        self._loop = loop
        self._shutdown: Callable[[], None] = provider.shutdown
        self._executor = ThreadExecutor(loop, 1, "kvcore-spans")
        self.tracer = SpanTracer(provider.get_tracer("kvcore"))

    async def close(self) -> None:
        """Send what has ended, for a bounded time. What is open is not sent."""
        done: asyncio.Future[None] = self._loop.create_future()

        def ended(_: Outcome[None]) -> None:
            if not done.done():
                done.set_result(None)

        self._executor.submit(self._shutdown, ended)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await done
        except TimeoutError:
            _log.warning("the last spans could not be sent in %g s", _CLOSE_S)
        finally:
            self._executor.close()


def open_spans(loop: asyncio.AbstractEventLoop, endpoint: str) -> SpanExport:
    """Begin to export to the collector at `endpoint` (OTLP over HTTP). `ConfigError`: it cannot work."""
    return SpanExport(loop, _url(endpoint))


def _provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"log.otlp_endpoint needs OpenTelemetry ({error}): pip install 'kvcore[otel]'") from None
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
    provider = TracerProvider(resource=Resource.create({"service.name": "kvcore"}), shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_QUEUE_MAX,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH_MAX,
        )
    )
    return provider


def _url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError("log.otlp_endpoint: write http://HOST:PORT or https://HOST:PORT/v1/traces")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{_PATH}"


def _worker(holder: str) -> str:
    return holder.removeprefix(_WORKER)
