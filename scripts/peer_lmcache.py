"""The other half of `bench_peers.py`: drives an LMCache server with LMCache's own client classes.

    .venv-peers/bin/python scripts/peer_lmcache.py ADDRESS PAGE_BYTES

Runs in the peers' environment, where kvcore is not installed. One JSON command a line comes in on stdin, one JSON reply
a line goes out on stdout; whatever the library prints goes to stderr. Everything is timed here, beside the client, as
it is for kvcore.

The worker's side is the engine-driven one over shared memory (`EngineDrivenContextShm`), the only one of LMCache's that
works without a GPU: PREPARE_STORE names the slots, this process copies, COMMIT_STORE publishes; PREPARE_RETRIEVE and
COMMIT_RETRIEVE likewise. Both the plain copy and the copies into and out of slots are `Tensor.copy_` of whole pages on
one thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import zmq
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from peers.inputs import Watch

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
MODEL = "bench"
INSTANCE = 1
PATIENCE_S = 60.0


class Peer:
    """The commands, by name, for one model whose chunks have `page_bytes`."""

    def __init__(self, address: str, page_bytes: int) -> None:
        torch.set_num_threads(1)
        hidden = page_bytes // (2 * CHUNK_TOKENS * torch.float16.itemsize)
        self._shape = torch.Size([2, 1, CHUNK_TOKENS, hidden])
        assert self._shape.numel() * torch.float16.itemsize == page_bytes
        self._client = RequestClientFactory.create(address, context=zmq.Context())
        assert self._client.ping(None).result(PATIENCE_S)
        payload = RegisterEngineDrivenContextPayload(
            INSTANCE, MODEL, 1, BLOCK_TOKENS, 1, hidden, "float16", False, CHUNK_TOKENS
        )
        pool = self._client.register_kv_cache_engine_driven_context(payload).result(PATIENCE_S)
        if not pool.shm_name:
            raise SystemExit("the LMCache server offers no shared memory; its log says why")
        layout = MemoryLayoutDesc(shapes=[self._shape], dtypes=[torch.float16])
        metadata = EngineDrivenContextMetadata(layout_desc=layout, block_size=BLOCK_TOKENS, use_mla=False)
        self._worker = EngineDrivenContextShm(metadata, self._client, PATIENCE_S, pool.shm_name, pool.pool_size)
        self._source: list[torch.Tensor] = []
        self._target: list[torch.Tensor] = []
        self._sessions = 0

    def versions(self) -> dict:
        from importlib.metadata import version

        return {name: version(name) for name in ("lmcache", "torch", "pyzmq", "blake3")}

    def fill(self, chunks: int) -> dict:
        """Store the first `chunks` chunks of the prompt that the lookups ask for."""
        self._store(_key("fill", _prompt(chunks), 0), self._pages(chunks, 0.0))
        return {}

    def lookups(self, count: int, chunks: int, in_flight: int) -> dict:
        """Whole lookups, answered in full: LOOKUP, QUERY, then the locks given back and the session ended."""
        prompt = _prompt(chunks)
        begin, cpu = time.perf_counter(), time.process_time()
        waiting = deque(
            (steps, next(steps)) for steps in (self._lookups(prompt, count // in_flight) for _ in range(in_flight))
        )
        while waiting:
            steps, future = waiting.popleft()
            future.result(PATIENCE_S)
            following = next(steps, None)
            if following is not None:
                waiting.append((steps, following))
        done = count // in_flight * in_flight
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu, "count": done}

    def _lookups(self, prompt: tuple[int, ...], count: int) -> Iterator[Any]:
        """One after the other."""
        for _ in range(count):
            yield from self._lookup(prompt)

    def _lookup(self, prompt: tuple[int, ...]) -> Iterator[Any]:
        """Each step yields the future that the next one needs."""
        self._sessions += 1
        session = f"s{self._sessions}"
        key = _key(session, prompt, None)
        yield self._client.lookup(key, 1)
        found = None
        while found is None:
            answer = self._client.query_prefetch_status(session)
            yield answer
            found = answer.result(PATIENCE_S)
        assert found * CHUNK_TOKENS == len(prompt), f"only {found} chunks found"
        self._client.free_lookup_locks(key, 1)
        yield self._client.end_session(session)

    def copies(self, turn: int, batch: int) -> dict:
        """Store a new batch, retrieve it, and copy the same bytes once between private buffers."""
        if not self._source:
            self._source, self._target = self._pages(batch, 1.0), self._pages(batch, 2.0)
        tokens = (turn, *_prompt(batch)[1:])
        key = _key(f"c{turn}", tokens, 0)
        watch = Watch()
        self._store(key, self._source)
        watch.stop("store")
        self._client.lookup(key.no_worker_id_version(), 1).result(PATIENCE_S)
        assert self._client.wait_prefetch_status(key.request_id, PATIENCE_S).result(PATIENCE_S) == batch
        watch.start()
        self._retrieve(key, self._target)
        watch.stop("retrieve")
        assert all(bool((page == 1.0).all()) for page in self._target)
        self._client.end_session(key.request_id).result(PATIENCE_S)
        watch.start()
        for source, target in zip(self._source, self._target, strict=True):
            target.copy_(source)
        watch.stop("plain")
        return watch.seconds

    def _pages(self, count: int, value: float) -> list[torch.Tensor]:
        return [torch.full(self._shape, value, dtype=torch.float16) for _ in range(count)]

    def _store(self, key: IPCCacheServerKey, pages: list[torch.Tensor]) -> None:
        slots, _ = self._worker.prepare_store(key, INSTANCE)
        for slot, page in zip(slots, pages, strict=True):
            slot.copy_(page)
        assert self._worker.commit_store(key, INSTANCE, [])

    def _retrieve(self, key: IPCCacheServerKey, pages: list[torch.Tensor]) -> None:
        slots = self._worker.prepare_retrieve(key, INSTANCE)
        for slot, page in zip(slots, pages, strict=True):
            page.copy_(slot)
        assert self._worker.commit_retrieve(key, INSTANCE)

    def clear(self) -> dict:
        """Make room: the next batches go into the same memory, whose pages have been touched."""
        self._client.clear(True).result(PATIENCE_S)
        return {}

    def close(self) -> None:
        self._worker.close()
        self._client.close()


def _key(session: str, tokens: tuple[int, ...], worker: int | None) -> IPCCacheServerKey:
    return IPCCacheServerKey(MODEL, 1, worker, tokens, 0, len(tokens), session, num_kv_readers=1)


def _prompt(chunks: int) -> tuple[int, ...]:
    return tuple(range(chunks * CHUNK_TOKENS))


def main() -> int:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library may print
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    replies.write(json.dumps(peer.versions()) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        replies.write(json.dumps(getattr(peer, name)(**command)) + "\n")
    peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
