"""What staying on one thread costs. Bar: the guards of a lookup take at most 1 % of it.

The guards of one whole lookup (LOOKUP, QUERY, END through `CacheServer.handle`, answered from L1) are counted, their
price is measured alone, and their share of the same lookup is asserted when the run asks for it with
`--benchmark-only`. The lookup is the shortest there is (one chunk of one row), where the share is largest.
"""

from __future__ import annotations

import asyncio
from timeit import repeat
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace, ObjectKey
from kvcore.l1 import L1Cache
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.confined import LoopConfined
from kvcore.service import protocol as wire
from kvcore.service.client import identity_of
from kvcore.service.server import CacheServer
from kvcore.storage import Storage, StorageConfig

CHUNK = 256
SHARE_MAX = 0.01
ROUNDS = 300


class Bench:
    """A server whose L1 has one chunk, and a client that asks for it."""

    def __init__(self) -> None:
        group = ObjectGroup(kind=GroupKind.FULL, block_tokens=16, bytes_per_block=64)
        layout = CacheLayout(groups=(group,), ranks=1, chunk_tokens=CHUNK)
        placement, clock = Placement(), SystemClock()
        identity = identity_of(Namespace(model_name="m", chunk_tokens=CHUNK), layout, placement)
        l1 = L1Cache(PlainArena(1 << 16), LruPolicy)
        storage = Storage(layout=layout, model_name="m", l1=l1, adapters=[], clock=clock, config=StorageConfig())
        self.hash = b"h" * 32
        key = ObjectKey(self.hash, "m", 0)
        storage.reserve_store("tag", "holder", [key], layout.cell_bytes(0))
        storage.commit_store("tag", "holder", [key])
        self.server = CacheServer(
            storage, layout=layout, model_name="m", identity=identity, placement=placement, clock=clock
        )
        self.requests = 0
        self.epoch = 0
        self.ask(wire.Hello(identity, 0))

    def ask(self, message: wire.Request) -> wire.Reply:
        self.requests += 1
        header = wire.Header(wire.PROTOCOL_VERSION, self.requests, 7, self.server.incarnation)
        return wire.read_reply(self.server.handle(b"peer", wire.pack(header, message)))

    def lookup(self) -> wire.Reply:
        self.epoch += 1
        self.ask(wire.Lookup("s", self.epoch, self.epoch, 0, b"", [self.hash], CHUNK + 1, 0, "", 1000))
        reply = self.ask(wire.Query("s", self.epoch, self.epoch))
        self.ask(wire.EndSession("s", self.epoch))
        return reply


@pytest.fixture
def bench() -> Any:
    loop = asyncio.new_event_loop()

    async def make() -> Bench:
        return Bench()

    made = loop.run_until_complete(make())
    asyncio.events._set_running_loop(loop)
    yield made
    asyncio.events._set_running_loop(None)
    loop.close()


def test_the_guards_of_the_shortest_lookup(
    bench: Bench, benchmark: BenchmarkFixture, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    check = LoopConfined.check
    with monkeypatch.context() as patched:
        patched.setattr(LoopConfined, "check", lambda guard: (counted.append(1), check(guard))[1])
        assert isinstance(bench.lookup(), wire.Ready)
    benchmark.pedantic(bench.lookup, rounds=ROUNDS, warmup_rounds=20)
    lookup_s = benchmark.stats.stats.min if benchmark.stats else min(repeat(bench.lookup, number=1, repeat=ROUNDS))
    guard = LoopConfined()
    guard_s = min(repeat(guard.check, number=1000, repeat=20)) / 1000
    share = len(counted) * guard_s / lookup_s
    benchmark.extra_info.update(guards=len(counted), guard_ns=guard_s * 1e9, lookup_us=lookup_s * 1e6, share=share)
    print(f"{len(counted)} guards of {guard_s * 1e9:.0f} ns in {lookup_s * 1e6:.0f} us: {share:.2%}")
    assert counted
    if request.config.getoption("benchmark_only"):
        assert share <= SHARE_MAX
