"""Marks that the components' own statistics tell: one read at the end of a component's life says whether it was there.

`read` adds up how often each mark of `TABLES[type(statistics)]` was met, nested statistics included. It costs nothing
while the run goes on. Whether a counter itself is right is the business of the oracles.

Nothing is held.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.budget import BudgetStatistics
from kvcore.connectors.scheduler import SchedulerConnectorStatistics
from kvcore.connectors.worker import WorkerConnectorStatistics
from kvcore.l1_statistics import L1Statistics
from kvcore.l2.pump import PumpStatistics
from kvcore.l2.statistics import L2Statistics
from kvcore.loads import LoadStatistics
from kvcore.prefetch import PrefetchStatistics
from kvcore.service.connection import ConnectionStatistics
from kvcore.service.page_desk import PageStatistics
from kvcore.service.scheduler_client import SchedulerClientStatistics
from kvcore.service.server import ServerStatistics
from kvcore.service.worker_client import WorkerClientStatistics
from kvcore.sim.sometimes import Mark, sometimes
from kvcore.storage import StorageStatistics
from kvcore.writeback import WritebackStatistics

Table = Mapping[str, Mark]
"""Field of a statistics object -> what it means that it is not zero."""

_L1: Table = {
    "evictions": sometimes("l1.evicted", "an object was evicted", common=True),
    "expired_leases": sometimes("l1.lease_expired", "a read lease ran out"),
    "expired_writes": sometimes("l1.write_expired", "a write lease ran out"),
}
_BUDGET: Table = {
    "waited": sometimes("prefetch.admission_waited", "a lookup waited for bytes of the budget", common=True),
    "cut": sometimes("prefetch.admission_cut", "a lookup wanted more than the whole budget and was cut", common=True),
}
_LOADS: Table = {
    "joined": sometimes("prefetch.load_joined", "a lookup waited for a load that another had begun", common=True),
    "failed": sometimes("prefetch.load_failed", "a cell did not arrive from L2", common=True),
    "refused": sometimes("prefetch.load_no_space", "a planned load found no room in L1", common=True),
    "discarded": sometimes("prefetch.load_lost_race", "a load arrived when a worker had stored the same cell"),
    "abandoned": sometimes("prefetch.load_abandoned", "a load arrived or was dropped when nobody waited any more"),
    "dropped": sometimes("prefetch.load_dropped", "a load lost its last reader while it waited for its turn"),
}
_PREFETCH: Table = {
    "replanned": sometimes("prefetch.replanned", "a cell failed and the plan was made again", common=True),
    "cancelled": sometimes("prefetch.cancelled", "a lookup was cancelled before it had an answer", common=True),
    "expired": sometimes("prefetch.leases_ran_out", "a lookup was answered and nobody came for its leases"),
}
_WRITEBACK: Table = {
    "present": sometimes("writeback.present", "a store to L2 found the key there already", common=True),
    "dropped": sometimes("writeback.dropped", "an object left L1 before it was written back"),
    "retried": sometimes("writeback.retried", "a store to L2 was tried again"),
    "full": sometimes("writeback.full", "L2 had no room for an object", common=True),
    "failed": sometimes("writeback.failed", "a store to L2 failed for good", common=True),
    "deadlines": sometimes("writeback.deadline", "a store to L2 took longer than its deadline"),
    "made_temporary": sometimes("writeback.made_temporary", "an object left L1 because L2 had it", common=True),
}
_PUMP: Table = {
    "deadlines": sometimes("l2.task_deadline", "an L2 task did not end before its deadline"),
    "late": sometimes("l2.task_late", "the result of an L2 task came after its deadline"),
    "refused": sometimes("l2.task_refused", "an adapter raised when it was given a task"),
}
_L2: Table = {
    "retry": sometimes("l2.store_retry", "an adapter could not take a key yet"),
    "evictions": sometimes("l2.evicted", "an adapter evicted a record", common=True),
    "short": sometimes("l2.record_short", "a record without a whole header was found"),
    "torn": sometimes("l2.record_torn", "a torn record was found"),
    "foreign": sometimes("l2.record_foreign", "a record of another key was found"),
    "stale_version": sometimes("l2.record_stale", "a record of another format version was found"),
    "flipped": sometimes("l2.record_flipped", "a record with a wrong checksum was found"),
    "missing": sometimes("l2.record_missing", "a record had vanished between lookup and load"),
    "unreadable": sometimes("l2.record_unreadable", "a record could not be read"),
    "io_errors": sometimes("l2.io_error", "a store's operation failed", common=True),
    "recovered": sometimes("l2.recovered", "records were found when an adapter was opened", common=True),
}
_CONNECTION: Table = {
    "replies_late": sometimes("net.reply_late", "a reply came after its request had been given up, or twice"),
    "replies_foreign": sometimes("net.reply_foreign", "a client got a frame that was not for it or no frame at all"),
    "timeouts": sometimes("net.request_timeout", "a request got no reply in time", common=True),
    "resends": sometimes("net.debt_resent", "a message that must arrive was sent again", common=True),
}
_SCHEDULER_CLIENT: Table = {
    "replies_late": sometimes("lookup.reply_late", "a reply came for a lookup that was over or superseded"),
    "outcomes_failed": sometimes("lookup.server_failed", "a lookup was answered 0 because of a server", common=True),
    "hashes_saved": sometimes("lookup.hashes_saved", "a lookup named hashes that the server had", common=True),
}
_WORKER_CLIENT: Table = {
    "batches_lost": sometimes("worker.batch_lost", "a worker's batch got no reply, or an error", common=True),
}
_SERVER: Table = {
    "sessions_expired": sometimes("server.session_expired", "a session died because nobody named it", common=True),
}
_PAGES: Table = {
    "cells_stored": sometimes("server.copied_out", "a server copied a cell out of a worker's pages", common=True),
    "cells_retrieved": sometimes("server.copied_in", "a server copied a cell into a worker's pages", common=True),
    "cells_cancelled": sometimes("server.copy_cancelled", "a server's copy ended before it had begun"),
    "cells_failed": sometimes("server.copy_failed", "a server could not copy a worker's pages", common=True),
}
_ERRORS: Table = {
    "duplicate": sometimes("server.duplicate", "a server was sent a request a second time", common=True, seeds=500),
    "stale_incarnation": sometimes(
        "server.stale_incarnation", "a request was meant for an earlier life of a server", common=True
    ),
    "unknown_tag": sometimes("server.unknown_tag", "a commit or abort came for what was not open", common=True),
    "base_mismatch": sometimes("server.base_mismatch", "a session's hashes were not those that the client relied on"),
    "malformed": sometimes("server.malformed", "a server got a frame that it could not read"),
}
_CONNECTOR: Table = {
    "load_failures": sometimes("connector.load_failed", "an admitted load brought less than was promised"),
    "tokens_refused": sometimes("connector.refused", "the admission promised less than was found"),
    "lookups_unwanted": sometimes("connector.lookup_unwanted", "a lookup was given up, or not begun, as too dear"),
    "lookups_hurried": sometimes("connector.lookup_hurried", "a lookup was told to end with what had arrived"),
}
_WORKER: Table = {
    "stores_cancelled": sometimes("worker.store_cancelled", "a fence took cells from a store", common=True),
    "fences_waited": sometimes("worker.fence_waited", "a fence waited for a copy", common=True),
    "loads_failed": sometimes("worker.load_failed", "a load ended without some of its cells", common=True, seeds=500),
    "copies_refused": sometimes("worker.copy_refused", "the device did not take a copy"),
}

TABLES: Mapping[type, Table] = {
    L1Statistics: _L1,
    BudgetStatistics: _BUDGET,
    LoadStatistics: _LOADS,
    PrefetchStatistics: _PREFETCH,
    WritebackStatistics: _WRITEBACK,
    PumpStatistics: _PUMP,
    L2Statistics: _L2,
    ConnectionStatistics: _CONNECTION,
    SchedulerClientStatistics: _SCHEDULER_CLIENT,
    WorkerClientStatistics: _WORKER_CLIENT,
    ServerStatistics: _SERVER,
    PageStatistics: _PAGES,
    SchedulerConnectorStatistics: _CONNECTOR,
    WorkerConnectorStatistics: _WORKER,
}
_NO_TABLE: Table = {}
_NESTED: Mapping[type, tuple[str, ...]] = {
    StorageStatistics: ("l1", "prefetch", "writeback", "adapters"),
    PrefetchStatistics: ("budget", "loads"),
    ServerStatistics: ("pages",),
}

RESTART_SEEN = sometimes("net.restart_seen", "a client met a second life of a server", common=True)


def read(statistics: object, seen: dict[Mark, int]) -> None:
    """Add what the statistics of one component show to `seen`; nothing for a type without a table."""
    kind = type(statistics)
    if kind is tuple:
        for part in statistics:  # type: ignore[attr-defined]
            read(part, seen)
    for name in _NESTED.get(kind, ()):
        read(getattr(statistics, name), seen)
    for name, mark in TABLES.get(kind, _NO_TABLE).items():
        count = getattr(statistics, name)
        if count:
            seen[mark] = seen.get(mark, 0) + count
    if isinstance(statistics, ServerStatistics):
        for code, count in statistics.errors.items():
            if code in _ERRORS:
                seen[_ERRORS[code]] = seen.get(_ERRORS[code], 0) + count
    elif isinstance(statistics, ConnectionStatistics) and statistics.incarnations_seen > 1:
        seen[RESTART_SEEN] = seen.get(RESTART_SEEN, 0) + statistics.incarnations_seen - 1
