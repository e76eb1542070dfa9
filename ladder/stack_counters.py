"""Counters against what was seen to happen: hits <= lookups, bytes reported = bytes moved, each retry counted once.

What was seen comes from the watchers at the ports (`WatchedL1`, `WatchedAdapter`, the simulated device), which count
calls and their answers; what is judged are the statistics of the parts in between. Equal where every event passes both
sides; at most, where a deadline or a crash may lie between them. To be called at rest.

A part that has died and come back counts from nothing, and so do its watchers: they belong to the same life.

Nothing is held.
"""

from __future__ import annotations

from kvcore.ladder.server_stack import ServerStack
from kvcore.ladder.stack import CacheStack
from kvcore.ladder.watched_pages import WatchedPages
from kvcore.sim.oracles.findings import Findings
from kvcore.storage import StorageStatistics

COUNTED = ("stored", "bytes_in", "retry", "answers")
"""By the watched adapters, of stores."""


class CounterOracle:
    """Compares and reports. One per check."""

    def __init__(self, findings: Findings, where: str) -> None:
        self._findings = findings
        self._where = where

    def equal(self, name: str, told: int, seen: int) -> None:
        if told != seen:
            self._findings.report("counters", f"{self._where}: {name} is {told}, seen were {seen}")

    def at_most(self, name: str, told: int, limit: int) -> None:
        if told > limit:
            self._findings.report("counters", f"{self._where}: {name} is {told}, it can be {limit} at most")


def check_counters(stack: CacheStack, findings: Findings, servers: list[ServerStack] | None = None) -> None:
    """All of the stack; `servers`: only these, where others are dead."""
    for server in stack.servers if servers is None else servers:
        _check_server(server, findings)
    _check_connector(stack, CounterOracle(findings, "scheduler"), findings.tokens_taken, findings.loads_short)
    for rank in range(stack.config.layout.ranks):
        _check_worker(stack, rank, CounterOracle(findings, f"worker{rank}"))


def check_page_counters(stack: CacheStack, pages: WatchedPages, findings: Findings) -> None:
    """Copies by servers: what workers and servers count is at most what has passed through the pages."""
    if stack.config.transfer == "worker":
        return
    oracle = CounterOracle(findings, "copies by servers")
    workers = [stack.worker(rank).statistics() for rank in range(stack.config.layout.ranks)]
    servers = [copies for server in stack.servers if (copies := server.server.statistics().pages) is not None]
    for who, states in (("workers", workers), ("servers", servers)):
        stored = sum(state.bytes_stored for state in states)
        oracle.at_most(f"bytes stored, as the {who} count them,", stored, pages.bytes_moved["store"])
    oracle.at_most(
        "bytes loaded, as the workers count them,",
        sum(each.bytes_loaded for each in workers),
        pages.bytes_moved["load"],
    )


def _check_server(server: ServerStack, findings: Findings) -> None:
    state, oracle = server.storage.statistics(), CounterOracle(findings, server.name)
    seen = {name: sum(adapter.counts[name] for adapter in server.adapters) for name in ("loads", "load_hits")}
    prefetch = state.prefetch
    oracle.at_most("cells found in L1", prefetch.cells_l1, prefetch.cells_asked)
    oracle.at_most("cells found in L2", prefetch.cells_found, prefetch.cells_asked * len(server.adapters))
    oracle.equal("lookups ended", prefetch.ready + prefetch.cancelled, prefetch.started - prefetch.jobs_pending)
    oracle.at_most("cells submitted to adapters", seen["loads"], prefetch.loads.started)
    oracle.at_most("cells loaded", prefetch.loads.loaded, seen["load_hits"])
    oracle.equal("bytes loaded from L2", prefetch.loads.bytes_loaded, server.l1.bytes_from_stores)
    _check_writeback(state, server, oracle)


def _check_writeback(state: StorageStatistics, server: ServerStack, oracle: CounterOracle) -> None:
    writeback = state.writeback
    seen = {name: sum(adapter.counts[name] for adapter in server.adapters) for name in COUNTED}
    oracle.at_most("writebacks retried", writeback.retried, seen["retry"])
    judged = writeback.stored + writeback.present + writeback.full + writeback.failed + writeback.retried
    if not writeback.deadlines:  # else, what came late is seen and not judged
        oracle.at_most("answers of the stores", seen["answers"], judged)
    for name, told, stored in (
        ("objects written back", writeback.stored, seen["stored"]),
        ("bytes written back", writeback.bytes_stored, seen["bytes_in"]),
    ):
        if writeback.deadlines:
            oracle.at_most(name, told, stored)  # what came late was given up
        else:
            oracle.equal(name, told, stored)


def _check_connector(stack: CacheStack, oracle: CounterOracle, tokens_taken: int, loads_short: int) -> None:
    state = stack.scheduler.statistics()
    oracle.equal("tokens hit", state.tokens_hit, tokens_taken)
    oracle.at_most("tokens hit", state.tokens_hit, state.tokens_queried)
    oracle.at_most("loads planned", state.loads_planned, state.lookups)
    oracle.at_most("loads failed", state.load_failures, state.loads_planned)
    oracle.at_most("loads that gave less than was promised", loads_short, state.load_failures)


def _check_worker(stack: CacheStack, rank: int, oracle: CounterOracle) -> None:
    worker = stack.worker(rank)
    state = worker.statistics()
    moved = getattr(worker._device, "bytes_moved", None)  # a real device does not count
    if moved is None:
        return
    if stack.config.transfer == "server":
        for stream in ("store", "load"):
            oracle.equal(f"bytes that the device moved ({stream})", moved[stream], 0)
        return
    oracle.equal("bytes stored", state.bytes_stored, moved["store"])
    if state.loads_failed:
        oracle.at_most("bytes loaded", state.bytes_loaded, moved["load"])
    else:
        oracle.equal("bytes loaded", state.bytes_loaded, moved["load"])
