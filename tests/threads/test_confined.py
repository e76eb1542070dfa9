"""The core stays on its loop's thread: a call from any other one is stopped before it touches anything."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import Cache
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.worker import WorkerConnector
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher, Namespace
from kvcore.leases import Owner
from kvcore.ports import Copy
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.service import protocol as wire

CHUNK = 4
TOKENS = list(range(3 * CHUNK))
OWNER = Owner("session", 1, "lookup")

# What belongs to the loop, and one way to touch it.
CALLS: dict[str, Callable[[Any], object]] = {
    "Storage.start_lookup": lambda it: it.storage.start_lookup(
        OWNER, [], salt="", prompt_tokens=0, masks=[0], skip_chunks=0, deadline_ns=0
    ),
    "Storage.release_owner": lambda it: it.storage.release_owner(OWNER),
    "Storage.reserve_store": lambda it: it.storage.reserve_store("tag", "holder", [], 1),
    "Storage.commit_store": lambda it: it.storage.commit_store("tag", "holder", []),
    "Storage.abort_store": lambda it: it.storage.abort_store("tag", "holder", []),
    "Storage.open_read": lambda it: it.storage.open_read("holder", OWNER, []),
    "Storage.close_read": lambda it: it.storage.close_read("holder", OWNER, []),
    "Storage.give_up_holder": lambda it: it.storage.give_up_holder("holder"),
    "Storage.release_holder": lambda it: it.storage.release_holder("holder"),
    "Storage.drop_l1": lambda it: it.storage.drop_l1(),
    "Storage.statistics": lambda it: it.storage.statistics(),
    "CacheServer.handle": lambda it: it.server.handle(b"peer", b""),
    "CacheServer.expire": lambda it: it.server.expire(0),
    "CacheServer.worker_died": lambda it: it.server.worker_died("worker"),
    "CacheServer.statistics": lambda it: it.server.statistics(),
    "AdapterPump.lookup": lambda it: it.pump.lookup([], print, print, 1.0),
    "AdapterPump.load": lambda it: it.pump.load([], [], print),
    "AdapterPump.store": lambda it: it.pump.store([], [], print, print, 1.0),
    "AdapterPump.unlock": lambda it: it.pump.unlock([]),
    "AdapterPump, a notice": lambda it: it.pump._on_loads(),
    "AdapterPump, the notice of stores": lambda it: it.pump._on_stores(),
    "IndexedAdapter.submit_lookup_and_lock": lambda it: it.adapter.submit_lookup_and_lock([]),
    "IndexedAdapter.submit_load": lambda it: it.adapter.submit_load([], []),
    "IndexedAdapter.submit_store": lambda it: it.adapter.submit_store([], []),
    "IndexedAdapter.submit_unlock": lambda it: it.adapter.submit_unlock([]),
    "IndexedAdapter.take_lookup": lambda it: it.adapter.take_lookup(1),
    "IndexedAdapter.take_load": lambda it: it.adapter.take_load(1),
    "IndexedAdapter.pop_completed_stores": lambda it: it.adapter.pop_completed_stores(),
    "IndexedAdapter.delete": lambda it: it.adapter.delete([]),
    "IndexedAdapter.close": lambda it: it.adapter.close(),
    "IndexedAdapter, the end of a piece of work": lambda it: it.adapter._runner._ended(print, print, None),
    "Connection.request": lambda it: it.connection.request(wire.Ping("w"), print),
    "Connection.owe": lambda it: it.connection.owe("key", wire.Ping("w")),
    "Connection.close": lambda it: it.connection.close(),
    "Connection, a message": lambda it: it.connection._received(b""),
    "SchedulerClient.start": lambda it: it.scheduler.start("s", 1, [], prompt_tokens=0),
    "SchedulerClient.poll": lambda it: it.scheduler.poll("s", 1),
    "SchedulerClient.settle": lambda it: it.scheduler.settle("s", 1, 0),
    "SchedulerClient.release": lambda it: it.scheduler.release("s", 1),
    "WorkerClient.reserve_store": lambda it: it.worker.reserve_store("tag", []).send(None),
    "WorkerClient.commit_store": lambda it: it.worker.commit_store("tag", []).send(None),
    "WorkerClient.abort_store": lambda it: it.worker.abort_store("tag"),
    "WorkerClient.open_read": lambda it: it.worker.open_read("s", 1, []).send(None),
    "WorkerClient.close_read": lambda it: it.worker.close_read("s", 1, []).send(None),
    "SchedulerConnector.matched_tokens": lambda it: it.scheduling.matched_tokens(None, 0),
    "SchedulerConnector.after_alloc": lambda it: it.scheduling.after_alloc(None, (), 0),
    "SchedulerConnector.build_meta": lambda it: it.scheduling.build_meta(None),
    "SchedulerConnector.preempted": lambda it: it.scheduling.preempted("r"),
    "SchedulerConnector.finished": lambda it: it.scheduling.finished(None, ()),
    "SchedulerConnector.update_output": lambda it: it.scheduling.update_output(None, frozenset()),
    "WorkerConnector.fence": lambda it: it.working.fence(None),
    "WorkerConnector.wait_load": lambda it: it.working.wait_load(0),
    "WorkerConnector.wait_save": lambda it: it.working.wait_save(),
    "WorkerConnector.finished": lambda it: it.working.finished([]),
    "WorkerConnector.load_errors": lambda it: it.working.load_errors(),
    "ThreadExecutor.submit": lambda it: it.executor.submit(print, print),
    "ThreadExecutor.close": lambda it: it.executor.close(),
    "ThreadCopyEngine.submit": lambda it: it.device.submit([_copy()], stream="store"),
    "ThreadCopyEngine.close": lambda it: it.device.close(),
}


def _copy() -> Copy:
    return Copy(np.ones(1, np.uint8), np.zeros(1, np.uint8))


class Everything:
    """The objects of one cache on its loop, each used there once."""

    def __init__(self, cache: Cache) -> None:
        inner = cache._inner
        self.storage, self.server, self.connection = inner._storage, inner._server, inner._connection
        self.scheduler, self.worker, self.executor = inner._scheduler, inner._worker, inner._executor
        self.pump = self.storage._pumps[0]
        self.adapter: Any = self.pump.adapter
        self.layout: CacheLayout = self.storage.layout
        self.cache = cache
        cache._thread.call(self._use())

    async def _use(self) -> None:
        loop = self.cache._thread.loop
        self.device = ThreadCopyEngine(loop)
        self.device.compute_event()
        hasher = ChunkHasher(Namespace(model_name="m", chunk_tokens=CHUNK))
        self.scheduling = SchedulerConnector(self.layout, hasher, self.scheduler)
        self.scheduling.preempted("nobody")
        self.working = WorkerConnector(self.layout, 0, self.worker)
        self.working.load_errors()

    async def end(self) -> None:
        self.device.close()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everything]:
    directory: Path = tmp_path_factory.mktemp("kv")
    with Cache.open(
        namespace="m", chunk_bytes=64, l1_bytes=1 << 16, chunk_tokens=CHUNK, l2=f"file://{directory}/kv"
    ) as cache:
        assert cache.store(TOKENS, [bytes([number]) * 64 for number in range(3)]) == 3
        assert cache.flush()
        cache.drop_l1()
        assert cache.lookup(TOKENS) == len(TOKENS)
        made = Everything(cache)
        yield made
        cache._thread.call(made.end())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_another_thread_is_stopped(everything: Everything, name: str) -> None:
    with pytest.raises(AssertionError, match="call_soon_threadsafe"):
        CALLS[name](everything)


def test_the_cache_works_on_as_if_nothing_had_been_tried(everything: Everything) -> None:
    assert everything.cache.lookup(TOKENS) == len(TOKENS)
    assert everything.cache.retrieve(TOKENS)[1] == b"\x01" * 64


def test_results_of_blocking_work_come_on_the_loop(everything: Everything, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's work runs in other threads; what it hands back arrives on the loop's."""
    worked, ended = set(), set()
    backend, runner = everything.adapter._backend, everything.adapter._runner
    read, end = backend.read, runner._ended
    monkeypatch.setattr(backend, "read", lambda *given: (worked.add(threading.get_ident()), read(*given))[1])
    monkeypatch.setattr(runner, "_ended", lambda *given: (ended.add(threading.get_ident()), end(*given))[1])
    everything.cache.drop_l1()
    assert everything.cache.lookup(TOKENS) == len(TOKENS)
    assert ended == {everything.cache._thread._thread.ident}
    assert worked
    assert worked.isdisjoint(ended)


def test_the_guard_stays_in_an_optimised_build() -> None:
    """`python -O` takes assert statements out, and this guard not."""
    code = """
import threading
from kvcore.runtime.confined import LoopConfined
guard = LoopConfined()
guard.check()
def check():
    try:
        guard.check()
    except AssertionError:
        print("stopped")
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "stopped\n"
