"""The metrics of a server: what each is called, its unit, and where its value is read.

One table, `METRICS`, is the documentation (docs/metrics.md is made from it), the scrape and the dashboard's source.
Names follow Prometheus: base units, `_total` for what only grows, the unit last. Nothing is labelled by salt unless the
configuration says so: a salt is a tenant's name, and tenants are many.

Everything is read from `statistics()` at the moment of the scrape, on the loop; nothing is counted twice for it. The
text is made by prometheus-client where it is installed (`pip install 'kvcore[serve]'`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvcore.l2.breaker import BreakerState
from kvcore.service.host import HostStatistics

Labels = tuple[str, ...]
Read = Callable[[HostStatistics], Mapping[Labels, float]]


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels`: the names of the labels; `read` gives a value per tuple of label values."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    about: str
    read: Read
    labels: Labels = ()


def _of(part: str, *path: str) -> Read:
    """A number at a path below `storage` or `server`; nothing while there is none."""

    def read(state: HostStatistics) -> Mapping[Labels, float]:
        found: Any = getattr(state, part)
        for name in path:
            found = getattr(found, name) if found is not None else None
        return {} if found is None else {(): float(found)}

    return read


def _pages(name: str) -> Read:
    """Of the copies that the server makes."""
    return _of("server", "pages", name)


def _each(part: str, name: str) -> Read:
    """A dict of numbers, one label."""

    def read(state: HostStatistics) -> Mapping[Labels, float]:
        found = getattr(state, part)
        return {} if found is None else {(key,): float(value) for key, value in getattr(found, name).items()}

    return read


def _stores(name: str) -> Read:
    """A number of every L2 adapter that is there, by the store's name."""

    def read(state: HostStatistics) -> Mapping[Labels, float]:
        return {(store,): float(getattr(found, name)) for store, found in state.adapters.items()}

    return read


def _defects(state: HostStatistics) -> Mapping[Labels, float]:
    kinds = ("short", "torn", "long", "foreign", "stale_version", "flipped", "other_size", "missing", "unreadable")
    return {(store, kind): float(getattr(found, kind)) for store, found in state.adapters.items() for kind in kinds}


def _guards(name: str) -> Read:
    """A number of what stands around every L2 adapter that is there, by the store's name."""

    def read(state: HostStatistics) -> Mapping[Labels, float]:
        return {(store,): float(getattr(found, name)) for store, found in state.guards.items()}

    return read


def _breaker_states(state: HostStatistics) -> Mapping[Labels, float]:
    """Exactly one of a store's states is 1."""
    return {
        (store, one.value): float(found.breaker_state == one.value)
        for store, found in state.guards.items()
        for one in BreakerState
    }


def _away(state: HostStatistics) -> Mapping[Labels, float]:
    return {(store,): float(store in state.stores_away) for store in state.stores}


METRICS: tuple[Metric, ...] = (
    Metric(
        "kvcore_engine_connected",
        "gauge",
        "1",
        "0 while the first engine is awaited",
        lambda state: {(): float(state.server is not None)},
    ),
    Metric("kvcore_requests_total", "counter", "requests", "Frames received", _of("server", "requests")),
    Metric(
        "kvcore_operations_total",
        "counter",
        "requests",
        "Requests carried out, by operation",
        _each("server", "requests_by_operation"),
        ("operation",),
    ),
    Metric(
        "kvcore_errors_total",
        "counter",
        "requests",
        "Requests answered with an error, by code",
        _each("server", "errors"),
        ("code",),
    ),
    Metric("kvcore_received_bytes_total", "counter", "bytes", "Message bytes received", _of("server", "bytes_in")),
    Metric("kvcore_sent_bytes_total", "counter", "bytes", "Message bytes sent", _of("server", "bytes_out")),
    Metric("kvcore_connections", "gauge", "connections", "Connections known", _of("server", "connections")),
    Metric("kvcore_sessions", "gauge", "sessions", "Sessions open", _of("server", "sessions")),
    Metric(
        "kvcore_sessions_expired_total",
        "counter",
        "sessions",
        "Sessions that died of idleness",
        _of("server", "sessions_expired"),
    ),
    Metric("kvcore_lookups_open", "gauge", "lookups", "Lookups being worked on", _of("server", "lookups_open")),
    Metric("kvcore_workers", "gauge", "workers", "Workers registered", _of("server", "workers")),
    Metric(
        "kvcore_stores_open",
        "gauge",
        "stores",
        "Stores of workers between STORE and COMMIT",
        _of("server", "stores_open"),
    ),
    Metric(
        "kvcore_reads_open",
        "gauge",
        "reads",
        "Reads of workers between RETRIEVE and LOAD_DONE",
        _of("server", "reads_open"),
    ),
    Metric("kvcore_copies_open", "gauge", "batches", "Copies by the server, of pages", _pages("transfers_open")),
    Metric("kvcore_copies_stored_bytes_total", "counter", "bytes", "Read from workers' pages", _pages("bytes_stored")),
    Metric(
        "kvcore_copies_retrieved_bytes_total",
        "counter",
        "bytes",
        "Written into workers' pages",
        _pages("bytes_retrieved"),
    ),
    Metric("kvcore_copies_cancelled_total", "counter", "cells", "Given up by workers", _pages("cells_cancelled")),
    Metric("kvcore_copies_failed_total", "counter", "cells", "Not readable or writable", _pages("cells_failed")),
    Metric(
        "kvcore_l1_capacity_bytes", "gauge", "bytes", "Shared memory of L1", lambda state: {(): float(state.l1_bytes)}
    ),
    Metric(
        "kvcore_l1_used_bytes", "gauge", "bytes", "resident + staging + draining", _of("storage", "l1", "bytes_used")
    ),
    Metric("kvcore_l1_resident_bytes", "gauge", "bytes", "Readable objects", _of("storage", "l1", "bytes_resident")),
    Metric("kvcore_l1_staging_bytes", "gauge", "bytes", "Objects being written", _of("storage", "l1", "bytes_staging")),
    Metric(
        "kvcore_l1_draining_bytes",
        "gauge",
        "bytes",
        "Gone objects whose bytes a copy still touches",
        _of("storage", "l1", "bytes_draining"),
    ),
    Metric(
        "kvcore_l1_quarantined_bytes",
        "gauge",
        "bytes",
        "The part of draining that a silent worker may still touch",
        _of("storage", "l1", "quarantined_bytes"),
    ),
    Metric("kvcore_l1_largest_free_bytes", "gauge", "bytes", "Longest free run", _of("storage", "l1", "largest_free")),
    Metric("kvcore_l1_objects", "gauge", "objects", "Readable objects", _of("storage", "l1", "objects_resident")),
    Metric("kvcore_l1_leases", "gauge", "leases", "Read leases alive", _of("storage", "l1", "leases")),
    Metric("kvcore_l1_published_total", "counter", "objects", "Objects published", _of("storage", "l1", "published")),
    Metric(
        "kvcore_l1_discarded_total", "counter", "objects", "Writers who came second", _of("storage", "l1", "discarded")
    ),
    Metric("kvcore_l1_evictions_total", "counter", "objects", "Objects evicted", _of("storage", "l1", "evictions")),
    Metric(
        "kvcore_l1_no_space_total",
        "counter",
        "objects",
        "Objects refused for lack of room or quota",
        _of("storage", "l1", "no_space"),
    ),
    Metric(
        "kvcore_l1_expired_leases_total",
        "counter",
        "leases",
        "Read leases that ran out",
        _of("storage", "l1", "expired_leases"),
    ),
    Metric(
        "kvcore_l1_expired_writes_total",
        "counter",
        "objects",
        "Reservations that ran out",
        _of("storage", "l1", "expired_writes"),
    ),
    Metric("kvcore_lookup_started_total", "counter", "lookups", "Lookups begun", _of("storage", "prefetch", "started")),
    Metric("kvcore_lookup_ready_total", "counter", "lookups", "Lookups answered", _of("storage", "prefetch", "ready")),
    Metric(
        "kvcore_lookup_deadlines_total",
        "counter",
        "lookups",
        "Lookups answered at their deadline",
        _of("storage", "prefetch", "deadlines"),
    ),
    Metric(
        "kvcore_lookup_hurried_total",
        "counter",
        "lookups",
        "Lookups answered before their end, because the engine would not wait any longer",
        _of("storage", "prefetch", "hurried"),
    ),
    Metric(
        "kvcore_lookup_waiting",
        "gauge",
        "lookups",
        "Lookups that wait for prefetch budget",
        _of("storage", "prefetch", "jobs_waiting"),
    ),
    Metric(
        "kvcore_lookup_cells_asked_total",
        "counter",
        "cells",
        "Cells that lookups asked for",
        _of("storage", "prefetch", "cells_asked"),
    ),
    Metric(
        "kvcore_lookup_cells_l1_total", "counter", "cells", "Cells found in L1", _of("storage", "prefetch", "cells_l1")
    ),
    Metric(
        "kvcore_lookup_cells_found_total",
        "counter",
        "cells",
        "Cells found anywhere",
        _of("storage", "prefetch", "cells_found"),
    ),
    Metric(
        "kvcore_writeback_inflight_bytes",
        "gauge",
        "bytes",
        "Bytes on their way to L2",
        _of("storage", "writeback", "bytes_inflight"),
    ),
    Metric(
        "kvcore_writeback_queued",
        "gauge",
        "objects",
        "Objects waiting to be written to L2",
        _of("storage", "writeback", "queued"),
    ),
    Metric(
        "kvcore_writeback_stored_total",
        "counter",
        "objects",
        "Objects written to L2",
        _of("storage", "writeback", "stored"),
    ),
    Metric(
        "kvcore_writeback_stored_bytes_total",
        "counter",
        "bytes",
        "Bytes written to L2",
        _of("storage", "writeback", "bytes_stored"),
    ),
    Metric(
        "kvcore_writeback_dropped_total",
        "counter",
        "objects",
        "Objects not written for lack of room in the queue",
        _of("storage", "writeback", "dropped"),
    ),
    Metric(
        "kvcore_writeback_failed_total",
        "counter",
        "objects",
        "Objects that could not be written",
        _of("storage", "writeback", "failed"),
    ),
    Metric(
        "kvcore_writeback_retried_total",
        "counter",
        "objects",
        "Second and later attempts",
        _of("storage", "writeback", "retried"),
    ),
    Metric("kvcore_l2_away", "gauge", "1", "1 while a configured store has not answered yet", _away, ("store",)),
    Metric(
        "kvcore_l2_used_bytes",
        "gauge",
        "bytes",
        "Bytes in the store, envelopes included",
        _stores("bytes_used"),
        ("store",),
    ),
    Metric("kvcore_l2_objects", "gauge", "objects", "Objects in the store", _stores("objects"), ("store",)),
    Metric("kvcore_l2_lookups_total", "counter", "keys", "Keys looked up", _stores("lookups"), ("store",)),
    Metric("kvcore_l2_lookup_hits_total", "counter", "keys", "Keys found", _stores("lookup_hits"), ("store",)),
    Metric("kvcore_l2_loads_total", "counter", "keys", "Keys loaded or tried to", _stores("loads"), ("store",)),
    Metric("kvcore_l2_load_hits_total", "counter", "keys", "Keys loaded", _stores("load_hits"), ("store",)),
    Metric(
        "kvcore_l2_written_bytes_total", "counter", "bytes", "Payload bytes stored", _stores("bytes_in"), ("store",)
    ),
    Metric("kvcore_l2_read_bytes_total", "counter", "bytes", "Payload bytes loaded", _stores("bytes_out"), ("store",)),
    Metric("kvcore_l2_evictions_total", "counter", "objects", "Objects evicted", _stores("evictions"), ("store",)),
    Metric("kvcore_l2_io_errors_total", "counter", "errors", "Errors of the store", _stores("io_errors"), ("store",)),
    Metric(
        "kvcore_l2_defects_total",
        "counter",
        "records",
        "Records that were not what they should be, by kind",
        _defects,
        ("store", "kind"),
    ),
    Metric(
        "kvcore_l2_breaker_state",
        "gauge",
        "1",
        "1 for the state that the store's circuit breaker is in: closed, open or half_open",
        _breaker_states,
        ("store", "state"),
    ),
    Metric(
        "kvcore_l2_breaker_opened_total",
        "counter",
        "openings",
        "Times the breaker has opened, failed probes included",
        _guards("breaker_opened"),
        ("store",),
    ),
    Metric(
        "kvcore_l2_breaker_refused_total",
        "counter",
        "calls",
        "Calls that an open breaker has refused at once",
        _guards("breaker_refused"),
        ("store",),
    ),
    Metric(
        "kvcore_l2_breaker_probes_total",
        "counter",
        "calls",
        "Calls let through to see whether the store is back",
        _guards("breaker_probes"),
        ("store",),
    ),
    Metric(
        "kvcore_l2_deadlines_lookups_total",
        "counter",
        "lookups",
        "Lookups answered with nothing at the store's deadline",
        _guards("lookups_late"),
        ("store",),
    ),
    Metric(
        "kvcore_l2_deadlines_work_total",
        "counter",
        "calls",
        "Blocking calls overdue while the store hung",
        _guards("work_late"),
        ("store",),
    ),
    Metric(
        "kvcore_l2_retried_total",
        "counter",
        "keys",
        "Keys asked for again after a failure",
        _guards("keys_retried"),
        ("store",),
    ),
)
"""Every metric there is, in the order of a request's way."""


def samples(state: HostStatistics) -> Iterator[tuple[Metric, Mapping[Labels, float]]]:
    """Each metric with its values of this moment."""
    for metric in METRICS:
        yield metric, metric.read(state)


def exposition(state: HostStatistics) -> bytes:
    """The scrape in Prometheus' text format. Raises `ImportError` without prometheus-client."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collected:
        def collect(self) -> Iterator[Any]:
            for metric, values in samples(state):
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                found = family(metric.name, f"{metric.about} ({metric.unit})", labels=metric.labels)
                for labels, value in values.items():
                    found.add_metric(labels, value)
                yield found

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return bytes(generate_latest(registry))


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | kind | unit | labels | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.about} |")
    return "\n".join(lines) + "\n"
