"""Stores whose client knows the arena: bytes go without a copy, and the arena is let go at the end. Real NIXL."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvcore.connectors.vllm.host import CacheHost, HostConfig, ThreadPorts
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.inprocess import Cache
from kvcore.keys import Namespace
from kvcore.l2.open import parse_store
from kvcore.l2.wrapped_backend import opened
from kvcore.service.host import ServerHost
from kvcore.service.serve_config import L1Config, ServeConfig

MIB = 1 << 20
TOKENS = list(range(4 * 16))


@pytest.fixture
def nixl_url(needs, tmp_path):
    needs("nixl_cu12")
    return f"nixl+posix://{tmp_path}/objects"


def raw_backend(adapter):
    """The store itself, below all wrappers of adapter and backend."""
    for below in ("_inner", "inner", "_backend"):
        while hasattr(adapter, below):
            adapter = getattr(adapter, below)
    while hasattr(adapter, "inner"):
        adapter = adapter.inner
    return adapter


def through_l2(cache):
    """Store four chunks, and take them back from L2. The store that they went through."""
    chunks = [os.urandom(MIB) for _ in range(4)]
    assert cache.store(TOKENS, chunks) == 4
    assert cache.flush()
    assert cache.drop_l1() == 4
    assert cache.retrieve(TOKENS) == chunks
    [pump] = cache._inner._storage._pumps
    return raw_backend(pump.adapter)


def open_cache(url):
    return Cache.open(namespace="m", chunk_tokens=16, chunk_bytes=MIB, l1_bytes=16 * MIB, l2=url, timeout_s=60.0)


def staged_bytes(backend):
    return max(len(frame) for agent in backend._idle for frame in agent._frames)


def test_an_in_process_cache_moves_chunks_without_a_copy_and_lets_its_memory_go(nixl_url):
    with open_cache(nixl_url) as cache:
        backend = through_l2(cache)
        assert staged_bytes(backend) < MIB  # headers alone were staged
        agents = list(backend._idle)
        assert agents
        assert all(agent._regions for agent in agents)
    assert not backend._regions
    assert not any(agent._regions for agent in agents)


def test_with_a_codec_between_the_store_is_not_told_of_the_arena(nixl_url):
    pytest.importorskip("zstandard")
    with open_cache(nixl_url + "?compress=zstd") as cache:
        backend = through_l2(cache)
        assert not backend._regions
        assert staged_bytes(backend) >= MIB


def test_a_server_makes_its_shared_memory_known_and_unmaps_it_at_the_end(nixl_url, tmp_path):
    config = ServeConfig(listen=f"ipc://{tmp_path}/s.sock", l2=(nixl_url,), l1=L1Config(capacity_bytes=4 * MIB))

    async def life():
        host = ServerHost(config)
        await host.start()
        arena = host._arena
        backend = raw_backend(host._adapters[0])
        assert [region.nbytes for region in backend._regions] == [arena.buffer.nbytes]
        await host.close()
        return backend, arena

    backend, arena = asyncio.run(life())
    assert backend._regions == []
    assert arena._map.closed  # nothing of ours holds a view any more


def test_a_cache_in_the_engine_makes_its_memory_known(nixl_url):
    namespace = Namespace(model_name="m", chunk_tokens=16)
    group = ObjectGroup(kind=GroupKind.FULL, block_tokens=16, bytes_per_block=MIB)
    config = HostConfig(CacheLayout(groups=(group,), ranks=1, chunk_tokens=16), namespace, 4 * MIB, l2=(nixl_url,))

    async def life():
        host = CacheHost(config, ThreadPorts())
        [adapter] = host.storage._adapters
        backend = raw_backend(adapter)
        assert [region.nbytes for region in backend._regions] == [host._arena.buffer.nbytes]
        await host.close()
        return backend

    assert asyncio.run(life())._regions == []


def test_an_agent_that_is_in_use_at_the_close_forgets_the_region_when_its_call_ends(nixl_url):
    memory = bytearray(b"\1" * MIB)
    backend = parse_store(nixl_url).unopened()
    backend.register_region(memoryview(memory))
    opened(backend)
    with backend._agent() as agent:
        assert agent.registered(memoryview(memory)[:100], backend._regions)
        backend.close()
        with pytest.raises(BufferError):
            memory.append(0)  # it stays where it is while the agent may move bytes
    memory.append(0)
    assert not agent._regions
