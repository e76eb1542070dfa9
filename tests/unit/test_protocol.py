"""The wire format and what a server does with frames that are wrong: answered, counted, harmless."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError, ConfigError
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.l1 import L1Cache
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.runtime.clock import SystemClock
from kvcore.service import protocol as wire
from kvcore.service import shapes
from kvcore.service.client import identity_of
from kvcore.service.protocol import ErrorCode, Header, Message, Reply, ServerLimits
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.storage import Storage, StorageConfig

CHUNK = 4
GROUP = ObjectGroup(kind=GroupKind.FULL, block_tokens=CHUNK, bytes_per_block=64)
LAYOUT = CacheLayout(groups=(GROUP,), ranks=2, chunk_tokens=CHUNK)
IDENTITY = identity_of(Namespace(model_name="m", chunk_tokens=CHUNK), LAYOUT, Placement())
LIMITS = ServerLimits(
    frame_bytes_max=4096,
    batch_cells_max=8,
    chunks_per_session_max=8,
    hash_bytes_max=32,
    name_chars_max=16,
    salt_chars_max=16,
    sessions_max=2,
    workers_max=2,
    open_per_worker_max=2,
    connections_max=3,
    lookup_timeout_ms_max=1000,
)
HASHES = [bytes([i]) * 32 for i in range(1, 9)]


class ManualClock:
    """Time that a test moves by hand."""

    def __init__(self) -> None:
        self.time_ns = 1_000
        self._tokens = 0

    def now_ns(self) -> Any:
        return self.time_ns

    def token(self, nbytes: int) -> str:
        self._tokens += 1
        return self._tokens.to_bytes(nbytes, "big").hex()


class Bench:
    """A server without a transport, and a client that counts request ids."""

    def __init__(self, connection: int = 77) -> None:
        self.clock = ManualClock()
        self.bugs: list[BaseException] = []
        self.l1 = L1Cache(PlainArena(1 << 16), LruPolicy)
        self.storage = Storage(
            layout=LAYOUT, model_name="m", l1=self.l1, adapters=[], clock=SystemClock(), config=StorageConfig()
        )
        self.server = CacheServer(
            self.storage,
            layout=LAYOUT,
            model_name="m",
            identity=IDENTITY,
            placement=Placement(),
            clock=self.clock,
            config=ServerConfig(session_idle_ns=1_000_000),
            limits=LIMITS,
            on_bug=self.bugs.append,
        )
        self.connection = connection
        self.request_id = 0

    def frame(self, message: Message, **changes: int) -> bytes:
        self.request_id += 1
        incarnation = 0 if isinstance(message, wire.Hello) else self.server.incarnation
        header = Header(wire.PROTOCOL_VERSION, self.request_id, self.connection, incarnation)._replace(**changes)
        return wire.pack(header, message)

    def send(self, payload: bytes) -> Reply:
        return wire.read_reply(self.server.handle(b"peer", payload))

    def ask(self, message: Message, **changes: int) -> Reply:
        return self.send(self.frame(message, **changes))

    def hello(self) -> None:
        assert isinstance(self.ask(wire.Hello(IDENTITY, 0)), wire.Welcome)

    def code(self, reply: Reply) -> ErrorCode | None:
        return reply.code if isinstance(reply, wire.Error) else None

    def errors(self) -> dict[str, int]:
        return self.server.statistics().errors


def on_bench(scenario: Callable[[Bench], None]) -> None:
    async def main() -> None:
        bench = Bench()
        bench.hello()
        scenario(bench)
        assert bench.bugs == [], "our own bug behind a peer's message"
        bench.l1.check()
        await bench.storage.close()

    asyncio.run(main())


def lookup(session: str = "s", **changes: Any) -> wire.Lookup:
    fields: dict[str, Any] = {
        "session": session,
        "generation": 1,
        "epoch": 1,
        "base": 0,
        "base_hash": b"",
        "hashes": HASHES[:2],
        "prompt_tokens": 9,
        "skip_chunks": 0,
        "salt": "",
        "timeout_ms": 100,
    }
    return wire.Lookup(**{**fields, **changes})


def store(tag: str = "w:1", **changes: Any) -> wire.Store:
    fields: dict[str, Any] = {"worker": "w", "tag": tag, "rank": 0, "salt": "", "cells": [(0, HASHES[0])]}
    return wire.Store(**{**fields, **changes})


def every_request() -> list[Message]:
    return [
        wire.Hello(IDENTITY, 0),
        lookup(),
        wire.Query("s", 1, 1, hurry=True),
        wire.Settle("s", 1, 1, 1),
        wire.Release("s", 1, 1),
        wire.EndSession("s", 1),
        wire.Register("w", 0),
        wire.Ping("w"),
        store(),
        wire.Commit("w", "w:1", b"\x01"),
        wire.Abort("w", "w:1"),
        wire.Retrieve("w", 1, "s", 1, 0, [(0, 0)]),
        wire.LoadDone("w", 1, b"\x01"),
        wire.Status(),
        wire.Clear(),
        wire.Unregister("w"),
    ]


def test_every_message_survives_the_wire() -> None:
    header = Header(wire.PROTOCOL_VERSION, 5, 6, 7)
    for message in every_request():
        frame = wire.pack(header, message)
        assert wire.read_header(frame) == header
        assert wire.read_request(frame) == message
    replies: list[Message] = [
        wire.Welcome(LIMITS),
        wire.Ready(wire.pack_bits(0b1011)),
        wire.Reserved("seg", [Answer.RESERVED, Answer.BUSY], [(0, 64, 3), None]),
        wire.Finished([Answer.PUBLISHED]),
        wire.Error(ErrorCode.BUSY, "later"),
    ]
    for message in replies:
        assert wire.read_reply(wire.pack(header, message)) == message


@pytest.mark.parametrize("bits", [0, 1, 0b1011, 1 << 4096, (1 << 70) - 1])
def test_bit_sets_survive_the_wire(bits: int) -> None:
    assert wire.unpack_bits(wire.pack_bits(bits)) == bits


def test_a_negative_bit_set_is_refused() -> None:
    with pytest.raises(CallerError, match="not negative"):
        wire.pack_bits(-1)


def test_nothing_that_travels_may_carry_fields_that_nobody_knows() -> None:
    """A field that one side ignores is a promise that it does not keep; another version says so in its number."""
    structs = [
        value
        for module in (wire, shapes)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    ]
    assert len(structs) > 20
    assert [struct.__name__ for struct in structs if not struct.__struct_config__.forbid_unknown_fields] == []


def test_every_kind_of_request_is_answered_in_kind() -> None:
    def scenario(bench: Bench) -> None:
        answered = [type(bench.ask(message)).__name__ for message in every_request()]
        assert answered == [
            "Welcome",
            "Ack",
            "Ready",
            "Error",  # nothing is stored: a length of 1 was not answered
            "Done",
            "Done",
            "Done",
            "Done",
            "Reserved",
            "Finished",
            "Error",  # the tag was committed
            "Granted",
            "Error",  # nothing was granted
            "StatusReply",
            "Cleared",
            "Done",
        ]
        assert bench.errors() == {"invalid": 1, "unknown_tag": 2}

    on_bench(scenario)


def test_each_request_is_counted_once_and_each_error_by_its_code() -> None:
    def scenario(bench: Bench) -> None:
        before = bench.server.statistics()
        bench.ask(wire.Status())
        bench.ask(wire.Query("nobody", 1, 1))
        bench.send(b"garbage")
        bench.send(bench.frame(wire.Status())[:-1])
        after = bench.server.statistics()
        assert after.requests - before.requests == 4
        assert after.errors == {"malformed": 2}
        assert after.requests_by_operation == {"hello": 1, "status": 1, "query": 1}

    on_bench(scenario)


def test_a_frame_of_another_protocol_version_is_answered_with_both_versions() -> None:
    def scenario(bench: Bench) -> None:
        frame = bytearray(bench.frame(wire.Status()))
        frame[2] = 9
        answer = bench.server.handle(b"peer", bytes(frame))
        header, reply = wire.read_header(answer), wire.read_reply(answer)
        assert header is not None
        assert header.request_id == bench.request_id
        assert isinstance(reply, wire.Error)
        assert (reply.code, f"speaks {wire.PROTOCOL_VERSION}" in reply.message, "client 9" in reply.message) == (
            ErrorCode.VERSION,
            True,
            True,
        )

    on_bench(scenario)


def test_unknown_operations_and_unknown_fields_are_told_apart_and_refused() -> None:
    def scenario(bench: Bench) -> None:
        def body(value: object) -> bytes:
            return bench.frame(wire.Status())[: wire.HEADER_BYTES] + msgspec.msgpack.encode(value)

        assert bench.code(bench.send(body({"op": "format_disk"}))) is ErrorCode.UNKNOWN_OPERATION
        assert bench.code(bench.send(body({"op": "status", "colour": 1}))) is ErrorCode.MALFORMED
        assert bench.code(bench.send(body({"op": "query", "session": 5}))) is ErrorCode.MALFORMED
        assert bench.code(bench.send(body([1, 2]))) is ErrorCode.MALFORMED
        assert bench.code(bench.send(body({"op": "query", "session": "", "generation": 1, "epoch": 1})))
        assert bench.code(bench.send(body({"op": "query", "session": "s", "generation": -1, "epoch": 1})))
        query = {"op": "query", "session": "s", "generation": 1, "epoch": 1}
        assert bench.send(body(query)) == wire.Unknown(), "who is in no hurry need not say so"
        assert bench.send(body({**query, "hurry": True})) == wire.Unknown()
        for other in (1, 0, None, "yes", [True]):
            assert bench.code(bench.send(body({**query, "hurry": other}))) is ErrorCode.MALFORMED

    on_bench(scenario)


def test_deep_nesting_and_lying_lengths_are_malformed_and_cost_nothing() -> None:
    def scenario(bench: Bench) -> None:
        head = bench.frame(wire.Status())[: wire.HEADER_BYTES]
        for body in (b"\x91" * 4000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b""):
            assert bench.code(bench.send(head + body)) is ErrorCode.MALFORMED

    on_bench(scenario)


def test_over_every_limit_the_answer_is_an_error_and_nothing_is_done() -> None:
    def scenario(bench: Bench) -> None:
        bench.ask(wire.Register("w", 0))
        over: list[Message] = [
            lookup(session="s" * 17),
            lookup(salt="s" * 17),
            lookup(hashes=[b"h" * 33]),
            lookup(hashes=[b"h" * 32] * 9, prompt_tokens=100),
            lookup(timeout_ms=1001),
            wire.Register("w" * 17, 0),
            store(tag="t" * 17),
            store(salt="s" * 17),
            store(cells=[(0, HASHES[0])] * 9),
            store(cells=[(0, b"h" * 33)]),
            wire.Retrieve("w", 1, "s", 1, 0, [(0, 0)] * 9),
            wire.Commit("w", "w:1", b"\xff" * 20),
        ]
        for message in over:
            assert bench.code(bench.ask(message)) is ErrorCode.TOO_LARGE, message
        assert bench.code(bench.send(bench.frame(wire.Status()) + b"x" * 4096)) is ErrorCode.TOO_LARGE
        statistics = bench.server.statistics()
        assert (statistics.sessions, statistics.stores_open, statistics.workers) == (0, 0, 1)

    on_bench(scenario)


def test_full_tables_are_answered_with_busy() -> None:
    def scenario(bench: Bench) -> None:
        assert [bench.code(bench.ask(lookup(f"s{i}"))) for i in range(3)] == [None, None, ErrorCode.BUSY]
        assert [bench.code(bench.ask(wire.Register(f"w{i}", 0))) for i in range(3)] == [None, None, ErrorCode.BUSY]
        stores = [store(f"t{i}", worker="w0", cells=[(0, HASHES[i])]) for i in range(3)]
        assert [bench.code(bench.ask(message)) for message in stores] == [None, None, ErrorCode.BUSY]
        bench.ask(wire.Abort("w0", "t0"))
        assert bench.code(bench.ask(stores[2])) is None

    on_bench(scenario)


def test_what_cannot_be_carried_out_is_the_peers_mistake_and_not_our_bug() -> None:
    def scenario(bench: Bench) -> None:
        bench.ask(wire.Register("w", 0))
        wrong: list[Message] = [
            wire.Register("x", 2),
            wire.Register("w", 1),
            store(rank=1),
            store(cells=[(1, HASHES[0])]),
            lookup(prompt_tokens=7),
            lookup(hashes=[]),
            wire.Hello(IDENTITY, 0),
        ]
        for message in wrong[:-1]:
            assert bench.code(bench.ask(message)) is ErrorCode.INVALID, message
        assert bench.code(bench.send(bench.frame(wrong[-1], request_id=0))) is ErrorCode.INVALID
        assert bench.code(bench.ask(store(worker="stranger"))) is ErrorCode.UNKNOWN_WORKER

    on_bench(scenario)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"hash_mode": "engine"}, ("tokens", "engine")),
        ({"hash_version": 99}, (str(IDENTITY.hash_version), "99")),
        ({"namespace_digest": b"\x01" * 32}, (IDENTITY.namespace_digest.hex(), "01" * 32)),
        ({"layout_fingerprint": "other"}, (IDENTITY.layout_fingerprint, "other")),
        ({"chunk_tokens": 8}, ("4", "8")),
        ({"placement_mode": "chunk"}, ("rank", "chunk")),
        ({"servers": 3}, ("1", "3")),
    ],
)
def test_a_difference_in_configuration_is_refused_with_both_values(change: Any, values: tuple[str, str]) -> None:
    """S45; R44, R75: refused at start, instead of a cache that never hits or loads garbage."""

    def scenario(bench: Bench) -> None:
        bench.connection += 1
        reply = bench.ask(wire.Hello(msgspec.structs.replace(IDENTITY, **change), 0))
        assert isinstance(reply, wire.Error)
        assert reply.code is ErrorCode.MISMATCH
        assert all(value in reply.message for value in values)
        assert bench.code(bench.ask(wire.Ping("w"))) is ErrorCode.HELLO_REQUIRED

    on_bench(scenario)


def test_a_request_is_executed_at_most_once() -> None:
    """R39: a message that arrives twice, or after a later one, is answered and not carried out."""

    def scenario(bench: Bench) -> None:
        bench.ask(wire.Register("w", 0))
        first = bench.frame(store())
        assert isinstance(bench.send(first), wire.Reserved)
        bench.ask(wire.Abort("w", "w:1"))
        assert bench.code(bench.send(first)) is ErrorCode.DUPLICATE
        assert bench.server.statistics().stores_open == 0
        assert bench.l1.statistics().objects_staging == 0

    on_bench(scenario)


def test_a_late_second_handshake_does_not_open_the_door_for_old_requests() -> None:
    def scenario(bench: Bench) -> None:
        hello = bench.frame(wire.Hello(IDENTITY, 0))
        assert isinstance(bench.send(hello), wire.Welcome)
        old = bench.frame(lookup())
        assert isinstance(bench.send(old), wire.Ack)
        assert isinstance(bench.send(hello), wire.Welcome)
        assert bench.code(bench.send(old)) is ErrorCode.DUPLICATE

    on_bench(scenario)


def test_the_operators_questions_need_no_handshake() -> None:
    def scenario(bench: Bench) -> None:
        bench.connection += 1
        assert isinstance(bench.ask(wire.Status(), incarnation=0), wire.StatusReply)
        assert isinstance(bench.ask(wire.Clear(), incarnation=0), wire.Cleared)

    on_bench(scenario)


def test_a_forgotten_connection_must_shake_hands_again() -> None:
    def scenario(bench: Bench) -> None:
        for other in range(LIMITS.connections_max):
            bench.send(bench.frame(wire.Hello(IDENTITY, 0), connection=1000 + other))
        assert bench.code(bench.ask(wire.Ping("w"))) is ErrorCode.HELLO_REQUIRED
        bench.hello()
        assert bench.code(bench.ask(wire.Ping("w"))) is ErrorCode.UNKNOWN_WORKER

    on_bench(scenario)


def test_a_request_for_an_earlier_life_of_the_server_is_refused() -> None:
    """R32."""

    def scenario(bench: Bench) -> None:
        reply = bench.ask(wire.Ping("w"), incarnation=bench.server.incarnation + 1)
        assert bench.code(reply) is ErrorCode.STALE_INCARNATION

    on_bench(scenario)


def test_query_is_repeated_unchanged_until_release_and_then_unknown() -> None:
    """R33: the second poll gives the same answer; after the release there is none."""

    def scenario(bench: Bench) -> None:
        bench.ask(wire.Register("w", 0))
        bench.ask(wire.Register("w1", 1))
        for rank, worker in enumerate(("w", "w1")):
            bench.ask(store(worker=worker, rank=rank))
            bench.ask(wire.Commit(worker, "w:1", b"\x01"))
        bench.ask(lookup())
        first = bench.ask(wire.Query("s", 1, 1))
        assert first == wire.Ready(wire.pack_bits(0b11))
        bench.ask(wire.Settle("s", 1, 1, 1))
        assert bench.ask(wire.Query("s", 1, 1)) == first
        assert bench.ask(wire.Query("s", 2, 1)) == wire.Unknown()
        assert bench.ask(wire.Query("s", 1, 2)) == wire.Unknown()
        bench.ask(wire.Release("s", 1, 1))
        assert bench.ask(wire.Query("s", 1, 1)) == wire.Unknown()
        assert bench.l1.statistics().leases == 0

    on_bench(scenario)


def test_a_repeated_end_of_an_old_life_does_not_touch_the_new_one() -> None:
    """R40: the session name is used again; the old END arrives once more, under a new request id."""

    def scenario(bench: Bench) -> None:
        bench.ask(lookup(epoch=1))
        bench.ask(lookup(epoch=2))
        assert bench.ask(wire.EndSession("s", 1)) == wire.Unknown()
        assert bench.ask(wire.Release("s", 1, 1)) == wire.Unknown()
        assert isinstance(bench.ask(wire.Query("s", 1, 2)), wire.Ready)
        assert bench.ask(wire.EndSession("s", 2)) == wire.Done()

    on_bench(scenario)


def test_a_base_that_does_not_fit_makes_the_client_send_all() -> None:
    def scenario(bench: Bench) -> None:
        bench.ask(lookup(epoch=1))
        grown = lookup(epoch=2, base=2, base_hash=HASHES[1], hashes=HASHES[2:4], prompt_tokens=17)
        assert bench.ask(grown) == wire.Ack()
        assert bench.server._sessions._sessions["s"].hashes == HASHES[:4]
        wrong = lookup(epoch=3, base=2, base_hash=HASHES[5], hashes=[], prompt_tokens=17)
        assert bench.code(bench.ask(wrong)) is ErrorCode.BASE_MISMATCH
        assert bench.code(bench.ask(lookup("new", base=1, hashes=[], base_hash=HASHES[0]))) is ErrorCode.BASE_MISMATCH
        assert bench.ask(wire.Query("s", 1, 2)) == wire.Unknown(), "the client has moved on"

    on_bench(scenario)


def test_sessions_expire_when_nobody_has_named_them_for_the_idle_time() -> None:
    def scenario(bench: Bench) -> None:
        bench.ask(lookup("used"))
        bench.ask(lookup("idle"))
        for _ in range(5):
            bench.clock.time_ns += 600_000
            bench.ask(wire.Query("used", 1, 1))
            bench.server.expire(bench.clock.time_ns)
        assert list(bench.server._sessions._sessions) == ["used"]
        assert bench.server.statistics().sessions_expired == 1

    on_bench(scenario)


def test_a_cell_is_open_under_one_ticket_at_a_time() -> None:
    """The repeated end of one read must not end the hold of another."""

    def scenario(bench: Bench) -> None:
        for rank, worker in enumerate(("w", "w1")):
            bench.ask(wire.Register(worker, rank))
            bench.ask(store(worker=worker, rank=rank))
            bench.ask(wire.Commit(worker, "w:1", b"\x01"))
        bench.ask(lookup())
        bench.ask(wire.Query("s", 1, 1))
        first = bench.ask(wire.Retrieve("w", 1, "s", 1, 0, [(0, 0), (0, 0)]))
        assert isinstance(first, wire.Granted)
        assert [slot is not None for slot in first.slots] == [True, False]
        second = bench.ask(wire.Retrieve("w", 2, "s", 1, 0, [(0, 0)]))
        assert isinstance(second, wire.Granted)
        assert second.slots == [None]
        assert bench.ask(wire.LoadDone("w", 1, b"\x01")) == wire.Finished([Answer.RELEASED, Answer.UNKNOWN])
        assert bench.code(bench.ask(wire.LoadDone("w", 1, b"\x01"))) is ErrorCode.UNKNOWN_TAG
        assert bench.l1.statistics().holds == 0

    on_bench(scenario)


def test_a_read_that_outlives_its_session_keeps_its_hold_and_is_told_that_the_lease_is_gone() -> None:
    """END_SESSION ends leases, not the copy that runs: the hold ends with LOAD_DONE."""

    def scenario(bench: Bench) -> None:
        for rank, worker in enumerate(("w", "w1")):
            bench.ask(wire.Register(worker, rank))
            bench.ask(store(worker=worker, rank=rank))
            bench.ask(wire.Commit(worker, "w:1", b"\x01"))
        bench.ask(lookup())
        bench.ask(wire.Query("s", 1, 1))
        bench.ask(wire.Retrieve("w", 1, "s", 1, 0, [(0, 0)]))
        bench.ask(wire.EndSession("s", 1))
        bench.storage.drop_l1()
        assert (bench.l1.statistics().leases, bench.l1.statistics().holds) == (0, 1)
        reply = bench.ask(wire.LoadDone("w", 1, b"\x01"))
        assert isinstance(reply, wire.Finished)
        assert reply.answers != [Answer.RELEASED]
        assert bench.l1.statistics().holds == 0

    on_bench(scenario)


def test_a_worker_that_leaves_or_dies_publishes_nothing() -> None:
    def scenario(bench: Bench) -> None:
        for end in (lambda: bench.ask(wire.Unregister("w")), lambda: bench.server.worker_died("w")):
            bench.ask(wire.Register("w", 0))
            bench.ask(store())
            assert bench.l1.statistics().holds == 1
            end()
            statistics = bench.l1.statistics()
            assert (statistics.holds, statistics.objects_staging, statistics.objects_resident) == (0, 0, 0)
            assert bench.code(bench.ask(wire.Commit("w", "w:1", b"\x01"))) is ErrorCode.UNKNOWN_WORKER

    on_bench(scenario)


def test_our_own_bug_is_answered_counted_and_reported() -> None:
    async def main() -> None:
        bench = Bench()
        bench.hello()
        bench.storage.drop_l1 = lambda: 1 // 0  # type: ignore[method-assign]
        assert bench.code(bench.ask(wire.Clear())) is ErrorCode.INTERNAL
        assert bench.errors() == {"internal": 1}
        assert [type(bug) for bug in bench.bugs] == [ZeroDivisionError]
        await bench.storage.close()

    asyncio.run(main())


def test_a_server_whose_identity_is_not_its_own_does_not_start() -> None:
    async def main() -> None:
        bench = Bench()
        for changes in ({"index": 1}, {"identity": msgspec.structs.replace(IDENTITY, layout_fingerprint="x")}):
            arguments: dict[str, Any] = {"identity": IDENTITY, "placement": Placement(), "clock": bench.clock}
            with pytest.raises(ConfigError):
                CacheServer(bench.storage, layout=LAYOUT, model_name="m", **{**arguments, **changes})
        await bench.storage.close()

    asyncio.run(main())


def mutated(draw: random.Random, frame: bytes) -> bytes:
    """A frame that was cut, stretched, flipped, or joined with another."""
    data = bytearray(frame)
    for _ in range(draw.randint(1, 4)):
        kind = draw.randint(0, 4)
        position = draw.randrange(len(data) + 1)
        if kind == 0:
            del data[position:]
        elif kind == 1 and position < len(data):
            data[position] ^= 1 << draw.randint(0, 7)
        elif kind == 2:
            data[position:position] = draw.randbytes(draw.randint(1, 8))
        elif kind == 3 and position < len(data):
            data[position] = draw.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC4, 0xCF, 0xDD, 0xDF, 0xFF))
        else:
            data += draw.randbytes(draw.randint(1, 16))
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_fuzzed_frames_are_answered_counted_and_harmless(seed: int) -> None:
    """S42: No frame raises, none is our bug, every one gets a reply that decodes, and the books stay straight."""

    def scenario(bench: Bench) -> None:
        draw = random.Random(seed)
        codes: dict[str, int] = {}
        for number in range(1500):
            if number % 50 == 0:
                bench.connection += 1  # a flipped bit may have used up all request ids of the old one
                bench.hello()
                bench.ask(wire.Register("w", 0))
            frame = bench.frame(draw.choice(every_request()))
            if draw.random() < 0.8:
                frame = mutated(draw, frame)
            answer = bench.server.handle(draw.randbytes(5), frame)
            header = wire.read_header(answer)
            assert header is not None
            sent = wire.read_header(frame)
            assert header.request_id == (sent.request_id if sent is not None else 0)
            code = bench.code(wire.read_reply(answer))
            codes[code.value if code else "done"] = codes.get(code.value if code else "done", 0) + 1
            if number % 100 == 0:
                bench.l1.check()
        assert bench.bugs == []
        assert {"done", "malformed", "unknown_tag", "stale_incarnation"} <= set(codes), "the fuzz reached deep places"
        bench.server.worker_died("w")
        bench.server.close()
        statistics = bench.l1.statistics()
        assert (statistics.leases, statistics.holds, statistics.objects_staging) == (0, 0, 0)

    on_bench(scenario)
