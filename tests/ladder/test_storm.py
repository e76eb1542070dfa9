"""Climbs in bad weather: servers restart, disks rot, connections break, clients give up. No output may change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvcore.l2 import envelope
from kvcore.ladder.pressure import Press, climb_pressed, floors
from kvcore.ladder.result import Floors
from kvcore.ladder.stack import StackConfig
from kvcore.service.client import ConnectionConfig, SchedulerConfig
from kvcore.sim.engine.engine import Engine
from kvcore.sim.ports.files import SimFiles
from kvcore.sim.workload import Draws

pytestmark = pytest.mark.ladder

REQUESTS = 40
MS = 1_000_000
PREEMPTED = Floors(requests=REQUESTS, preemptions=1)
LOADED = Floors(requests=REQUESTS, loads_verified=1)


def on_files(config: StackConfig) -> StackConfig:
    return replace(config, l2=("file",), weak_locks=False)


def impatient(config: StackConfig) -> StackConfig:
    """Time-outs of a few engine steps, so that a climb sees many."""
    return replace(
        on_files(config),
        connection=ConnectionConfig(5 * MS, 4 * MS, 3 * MS, 24 * MS, resends_max=50),
        lookup=SchedulerConfig(lookup_timeout_ns=8 * MS, server_timeout_ns=6 * MS, linger_ns=20 * MS),
    )


class Restarts(Press):
    """Every server dies before the hot pass, and in the middle of each pass for a moment or a while; its L2 stays.

    When it is back, the network is not; nor is it there when the first pass begins, so handshakes are lost.
    """

    restarts = 0

    def before(self, rung: str) -> None:
        for index in range(len(self.stack.servers) if rung == "3" else 0):
            self.restart(index)
            self.restarts += 1
        for memory in self.stack.memories.values():
            for key in list(memory.records)[5::40] if rung in ("3b", "4") else ():
                memory.records[key] = memory.records[key][:-1] if rung == "4" else b"?" + memory.records[key][1:]

    async def during(self, rung: str, engine: Engine) -> None:
        if rung == "2":
            await self._blackout()
        for index in range(len(self.stack.servers)):
            await asyncio.sleep(0.004)
            await self.outage(index, 0.012 if rung in ("2", "4") else 0)
            self.restarts += 1
            await self._blackout()

    async def _blackout(self) -> None:
        network = self.world.network
        for client in network.clients:
            network.partition(client)
        try:
            await asyncio.sleep(0.006)
        finally:
            for client in network.clients:
                network.heal(client)


@pytest.mark.parametrize("cell", ["full/r2/s2/async", "full+window+recurrent/r1/s1/sync"])
def test_servers_that_restart_with_a_warm_store_change_no_output(cell: str) -> None:
    def change(config: StackConfig) -> StackConfig:
        return replace(impatient(config), l2=("memory",) if cell.startswith("full/") else ("file",))

    press = Restarts()
    demands = floors(REQUESTS, r3=LOADED, r4=PREEMPTED, rreplay=LOADED)
    climbed = climb_pressed(cell, change=change, press=press, demands=demands)
    assert climbed.problems == []
    assert press.restarts >= 6


class Rot(Press):
    """Before every pass that reads, some records are flipped, cut, lengthened, swapped or gone, and reads fail."""

    damaged = 0

    def before(self, rung: str) -> None:
        draws = Draws(ord(rung[0]), "rot")
        for name, disk in self.world.disks.items():
            records = [record for record in disk.names if record.endswith(".kv")]
            for position, record in enumerate(records):
                if draws.below(6) == 0:
                    self._damage(disk, record, records[position - 1], draws)
                    self.damaged += 1
            disk.fail_op(10, kind="read")
            disk.fail_op(5, kind="write")
            disk.fail_op(3, kind="unlink")
            if rung == "replay":
                self.restart(int(name[len("server") : name.index(".")]), torn=True)

    @staticmethod
    def _damage(disk: SimFiles, record: str, other: str, draws: Draws) -> None:
        if record not in disk.names or other not in disk.names or other == record:
            return
        kind, size = draws.below(5), len(disk.data(record))
        if kind == 0:
            disk.flip_bit(record, draws.below(8 * size))
        elif kind == 1:
            disk.truncate(record, draws.below(size))
        elif kind == 2:
            disk.append(record, b"tail")
        elif kind == 3:
            disk.swap(record, other)
        else:
            disk.vanish(record)


def test_a_rotten_disk_makes_hits_shorter_and_nothing_wrong() -> None:
    press = Rot()
    demands = floors(REQUESTS, r3b=LOADED, r4=PREEMPTED, rreplay=LOADED)
    climbed = climb_pressed("full+window/r1/s1/async", change=on_files, press=press, demands=demands)
    assert climbed.problems == []
    assert press.damaged > 20
    shares = [climbed.counts(rung).hit_share or 0 for rung in ("3b", "replay")]
    assert max(shares) < 1


def test_a_store_that_trusts_its_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "check_record", lambda key, header, into, bytes_read: None)
    climbed = climb_pressed("full+window/r1/s1/async", change=on_files, press=Rot(), demands=floors(REQUESTS))
    assert any("[bytes]" in problem for problem in climbed.problems)


class BadNetwork(Press):
    """Connections break, slow down, vanish and repeat themselves; everything is well again at the end of a pass."""

    cuts = 0

    async def during(self, rung: str, engine: Engine) -> None:
        network, draws = self.world.network, Draws(ord(rung[0]), "weather")
        network.meddle = lambda client, up, payload: [payload] * (1 + (draws.below(8) == 0))
        try:
            while True:
                await asyncio.sleep(0.0005 * draws.between(1, 6))
                client = network.clients[draws.below(len(network.clients))]
                kind = draws.below(4)
                if kind == 0:
                    network.cut(client)
                    self.cuts += 1
                elif kind == 1:
                    network.clog(client, draws.below(4) * 2 * MS)
                elif kind == 2:
                    network.partition(client, to_server=bool(draws.below(2)), to_client=bool(draws.below(2)))
                else:
                    network.heal(client)
        finally:
            network.meddle = None
            for client in network.clients:
                network.clog(client, 0)
                network.heal(client)


@pytest.mark.parametrize("cell", ["full+window/r2/s2/async", "full/r1/s2/sync"])
def test_a_network_that_cuts_clogs_and_repeats_changes_no_output(cell: str) -> None:
    press = BadNetwork()
    demands = floors(REQUESTS, r3=LOADED, r4=PREEMPTED, rreplay=LOADED)
    climbed = climb_pressed(cell, change=impatient, press=press, demands=demands, reconnect_ns=2 * MS)
    assert climbed.problems == []
    assert press.cuts > 10


class Aborts(Press):
    """Every third request is given up at a drawn moment."""

    def __init__(self, requests: list[str]) -> None:
        self._requests = requests

    async def during(self, rung: str, engine: Engine) -> None:
        draws = Draws(ord(rung[0]), "aborts")
        for request_id in self._requests:
            await asyncio.sleep(0.0001 * draws.below(12))
            if draws.below(3) == 0:
                engine.abort(request_id)


@pytest.mark.parametrize("cell", ["full+window+recurrent/r2/s2/async", "full/r1/inproc/sync"])
def test_requests_that_are_given_up_take_nothing_with_them(cell: str) -> None:
    names = [f"f{family:02d}-{member}" for member in range(2) for family in range(20)]
    demands = floors(REQUESTS // 2, r0=Floors(requests=REQUESTS))
    climbed = climb_pressed(cell, press=Aborts(names), demands=demands)
    assert climbed.problems == []
    assert climbed.counts("2").requests < REQUESTS
    assert climbed.counts("3").loads_verified > 0
