"""The Redis store on a real server: what it promises when nothing fails, and what the server may answer."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from contextlib import closing

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey, key_text
from kvcore.l2 import redis_wire
from kvcore.l2.adapter import LockKind, StoreAnswer
from kvcore.l2.envelope import Defect, encode_header, record_bytes
from kvcore.l2.redis import RedisOptions, open_backend
from kvcore.l2.redis_wire import Wire

MIB = 1 << 20
SECRET = "s3cr3t-w0rd"


def named(key, prefix="kvcore:"):
    return prefix.encode() + key_text(key).encode()


def read(backend, keys, size=100):
    buffers = [bytearray(size) for _ in keys]
    return backend.read([(key, memoryview(buffer)) for key, buffer in zip(keys, buffers)]), buffers


def write(backend, keys, payloads):
    return backend.write([(key, memoryview(payload)) for key, payload in zip(keys, payloads)])


def test_what_is_stored_is_found_and_loaded_by_another_process(valkey, session, many):
    server = valkey()
    first, second = session(port=server.port), session(port=server.port)
    keys, payloads = many(300, 5000)
    assert first.store(keys, payloads) == ["stored"] * 300
    assert second.lookup(keys) == (1 << 300) - 1
    assert second.load(keys, [5000] * 300) == ((1 << 300) - 1, payloads)
    assert second.store(keys, payloads) == ["present"] * 300
    second.unlock(keys)
    assert second.adapter.lock_strength.kind is LockKind.NONE


@pytest.mark.parametrize("size", [0, 1, 16 * 1024, 16 * 1024 + 1, 65_536, 3 * MIB + 1])
def test_every_size_comes_back_byte_for_byte(valkey, key, size, opened):
    backend = opened(port=valkey().port)
    payload = bytes(range(256)) * (size // 256 + 1)
    keys = [key(number) for number in range(3)]
    payloads = [payload[number : number + size] for number in range(3)]
    assert write(backend, keys, payloads) == [StoreAnswer.STORED] * 3
    assert read(backend, keys, size) == ([None] * 3, payloads)


@pytest.mark.parametrize("near", [True, False])
def test_over_a_network_values_do_not_wait_for_answers(valkey, session, many, monkeypatch, near):
    """Where an answer costs a round trip all values are on their way at once; on this machine one after the other."""
    monkeypatch.setattr(redis_wire, "_is_near", lambda sock: near)
    store = session(port=valkey().port)
    keys, payloads = many(3, MIB)
    store.lookup(keys)  # there is a connection
    store.at_rest()  # and the scan of the start has ended
    order = []
    for name in ("send", "answer"):
        call = getattr(Wire, name)
        monkeypatch.setattr(
            Wire, name, lambda wire, *words, name=name, call=call: (order.append(name), call(wire, *words))[1]
        )
    assert (
        store.backend.write([(key, memoryview(payload)) for key, payload in zip(keys, payloads)])
        == [StoreAnswer.STORED] * 3
    )
    asked = ["send", *["answer"] * 3, "send"]  # STRLEN of each; of none the header
    assert order[:5] == asked
    assert order[5:] == (["send", "answer"] * 3 if near else ["send"] * 3 + ["answer"] * 3)
    assert store.load(keys, [MIB] * 3) == (0b111, payloads)


def test_a_machines_own_addresses_are_near_and_others_are_not():
    class Peer:
        family = socket.AF_INET

        def __init__(self, host):
            self.host = host

        def getpeername(self):
            if self.host is None:
                raise OSError("not connected any more")
            return (self.host, 6379)

    assert redis_wire._is_near(Peer("127.0.0.1"))
    assert redis_wire._is_near(Peer("::1"))
    assert not redis_wire._is_near(Peer("192.0.2.7"))
    assert not redis_wire._is_near(Peer("fe80::1%eth0"))
    assert not redis_wire._is_near(Peer(None))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert redis_wire._is_near(ours)


def test_a_record_is_the_envelope_under_the_name(valkey, key, opened):
    server = valkey()
    write(opened(port=server.port, prefix="mine[*]:"), [key(1)], [b"payload"])
    answer = server.say("GET", named(key(1), "mine[*]:"))
    assert answer.partition(b"\r\n")[2] == encode_header(key(1), b"payload") + b"payload\r\n"


def test_hostile_names_are_harmless(valkey, session):
    texts = ["", "*", "a\r\nFLUSHALL\r\n", "nul\0", "x" * 4000, "ü🙂", "../..", "[a]", "\\", "$5"]
    keys = [ObjectKey(b"h" * 32, text, 0, 0, salt) for text in texts for salt in texts]
    store = session(port=valkey().port)
    payloads = [b"%05d" % number for number in range(len(keys))]
    assert store.store(keys, payloads) == ["stored"] * len(keys)
    assert store.load(keys, [5] * len(keys))[1] == payloads
    assert {stored.key for stored in store.backend.scan()} == set(keys)


def test_a_scan_finds_ours_with_sizes_and_tells_strangers_apart(valkey, many, opened):
    server = valkey()
    backend = opened(port=server.port, prefix="p*:")
    keys, payloads = many(1200, 10)
    write(backend, keys, payloads)
    server.say("SET", "p*:junk", "junk")
    server.say("SET", "pp:other", "not under the prefix")
    server.say("LPUSH", "p*:list", "1")
    server.say("SET", "p*:renamed", encode_header(keys[0], b"x") + b"x")  # a record under a wrong name
    found = list(backend.scan())
    assert {stored.key for stored in found if stored.key} == set(keys)
    assert sorted(stored.name for stored in found if stored.key is None) == ["p*:junk", "p*:renamed"]
    assert {stored.record_bytes for stored in found if stored.key} == {record_bytes(keys[0], 10)}
    assert all(stored.age_s is not None for stored in found)


def test_a_scan_does_not_make_everything_young(valkey, key, opened):
    server = valkey()
    backend = opened(port=server.port)
    write(backend, [key(1)], [b"x"])
    before = server.say("OBJECT", "IDLETIME", named(key(1)))
    server.say("DEBUG", "SLEEP", "1.1")
    list(backend.scan())
    assert int(server.say("OBJECT", "IDLETIME", named(key(1)))[1:]) > int(before[1:])


def test_usage_is_what_the_server_says(valkey, many, opened):
    backend = opened(port=valkey(maxmemory="64mb").port)
    write(backend, *many(5, 100_000))
    usage = backend.usage()
    assert usage.objects == 5
    assert usage.bytes_used > 500_000
    assert usage.bytes_capacity == 64 * MIB


def test_databases_and_prefixes_are_worlds_of_their_own(valkey, key, opened):
    server = valkey()
    here = opened(port=server.port, db=0)
    write(here, [key(1)], [b"x"])
    for other in (opened(port=server.port, db=3), opened(port=server.port, prefix="q:")):
        assert other.find([key(1)]) == [False]
        assert list(other.scan()) == []


def test_a_unix_socket_works_like_tcp(valkey, session, many):
    store = session(unix_path=valkey(unix=True).unix_path)
    keys, payloads = many(3, MIB)
    assert store.store(keys, payloads) == ["stored"] * 3
    assert store.load(keys, [MIB] * 3) == (0b111, payloads)


def test_tls_works_and_an_unknown_certificate_is_refused(valkey, proxy, session, many, tls_server, tls_files, opened):
    front = proxy(valkey().port, tls_server)
    store = session(host="localhost", port=front.port, tls=True, tls_ca_file=str(tls_files[0]))
    keys, payloads = many(3, MIB)
    assert store.store(keys, payloads) == ["stored"] * 3
    assert store.load(keys, [MIB] * 3) == (0b111, payloads)
    with pytest.raises(ConfigError, match="not trusted"):
        opened(host="localhost", port=front.port, tls=True)
    opened(host="localhost", port=front.port, tls=True, tls_verify=False)
    with pytest.raises(ConfigError, match="TLS file"):
        opened(port=front.port, tls=True, tls_ca_file="/does/not/exist.pem")


def test_tls_files_that_were_replaced_are_used_without_a_restart(
    valkey, proxy, key, tls_server, tls_files, self_signed, tmp_path
):
    """S35: certificates that live for a day are renewed beside a store that runs for months."""
    front = proxy(valkey().port, tls_server)
    trusted = tmp_path / "trusted.pem"
    self_signed(tmp_path)[0].rename(trusted)
    waits = {"timeout_s": 20.0, "connect_timeout_s": 20.0}
    options = RedisOptions(host="localhost", port=front.port, tls=True, tls_ca_file=str(trusted), **waits)
    with closing(open_backend(options)) as backend:
        with pytest.raises(ConfigError, match="not trusted"):
            backend.open()
        shutil.copy(tls_files[0], tmp_path / "renewed.pem")
        (tmp_path / "renewed.pem").rename(trusted)
        backend.open()
        assert backend.find([key(1)]) == [False]


# --- passwords -------------------------------------------------------------------------------------------------------


def test_passwords_and_users_are_used_and_never_shown(valkey, key, opened):
    server = valkey(requirepass=SECRET)
    assert write(opened(port=server.port, password=SECRET), [key(1)], [b"x"]) == [StoreAnswer.STORED]
    options = RedisOptions(port=server.port, username="default", password=SECRET)
    opened(port=server.port, username="default", password=SECRET)
    assert SECRET not in repr(options)
    for wrong in (None, "wrong-" + SECRET):
        with pytest.raises(ConfigError) as refused:
            opened(port=server.port, password=wrong)
        assert SECRET not in str(refused.value)


def test_a_server_that_quotes_the_password_is_not_repeated(valkey, opened):
    server = valkey(rename_command=("AUTH", "hidden"))
    assert SECRET.encode() in server.say("AUTH", SECRET)  # that is how it could get into a log
    with pytest.raises(ConfigError) as refused:
        opened(port=server.port, password=SECRET)
    assert SECRET not in str(refused.value)


def test_a_user_who_may_not_write_reads_and_its_stores_fail_for_good(valkey, key, opened):
    server = valkey()
    write(opened(port=server.port), [key(1)], [b"x"])
    server.say("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+@read", "+ping")
    reader = opened(port=server.port, username="reader", password=SECRET)
    assert reader.find([key(1)]) == [True]
    assert write(reader, [key(2)], [b"y"]) == [StoreAnswer.FAILED]
    server.say("ACL", "SETUSER", "nobody", "on", f">{SECRET}", "~other:*", "+@all")
    with pytest.raises(ConfigError, match="NOPERM"):
        opened(port=server.port, username="nobody", password=SECRET)


def test_a_password_that_changed_later_is_an_error_and_not_a_crash(valkey, proxy, session, many):
    server = valkey()
    front = proxy(server.port)
    store = session(port=front.port)
    keys, payloads = many(2)
    store.store(keys, payloads)
    server.say("CONFIG", "SET", "requirepass", SECRET)
    front.cut()
    assert store.lookup(keys) == 0
    assert store.adapter.statistics().io_errors > 0


def test_a_server_with_too_many_clients_is_away_and_no_mistake(valkey, session, many):
    """S34: it says so to whoever comes with a password, before it has looked at that."""
    server = valkey(requirepass=SECRET, maxclients="1")
    with socket.create_connection(("127.0.0.1", server.port)) as other:
        other.sendall(b"PING\r\n")
        assert other.recv(100).startswith(b"-NOAUTH")  # it has the only place now
        store = session(port=server.port, password=SECRET, threads=1)
        assert not store.adapter.opened
    keys, payloads = many(2)
    end_s = time.monotonic() + 60  # the server notices within its own rhythm that the place is free
    while store.store(keys, payloads) != ["stored"] * 2:
        assert time.monotonic() < end_s


def test_a_wrong_database_is_a_mistake_of_the_caller(valkey, opened):
    with pytest.raises(ConfigError, match="does not let us in"):
        opened(port=valkey().port, db=99)


WRONG = [{"port": 0}, {"port": 70000}, {"db": -1}, {"timeout_s": 0}, {"ttl_s": 0.0}, {"tls": True, "unix_path": "/s"}]


@pytest.mark.parametrize("wrong", WRONG)
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        RedisOptions(**wrong)


# --- what the server decides -----------------------------------------------------------------------------------------


def test_a_time_to_live_is_set_and_renewed_by_a_repeated_store(valkey, key, opened):
    server = valkey()
    backend = opened(port=server.port, ttl_s=1000.0)
    write(backend, [key(1)], [b"x"])
    assert 900_000 < int(server.say("PTTL", named(key(1)))[1:]) <= 1_000_000
    server.say("PEXPIRE", named(key(1)), "100000")
    assert write(backend, [key(1)], [b"x"]) == [StoreAnswer.PRESENT]
    assert int(server.say("PTTL", named(key(1)))[1:]) > 900_000
    server.say("PEXPIRE", named(key(1)), "0")
    assert backend.find([key(1)]) == [False]
    assert read(backend, [key(1)], 1)[0] == [Defect.MISSING]


def test_a_full_server_without_eviction_answers_full(valkey, session, many):
    server = valkey(maxmemory="12mb", maxmemory_policy="noeviction")
    store = session(port=server.port)
    keys, payloads = many(20, MIB)
    answers = store.store(keys, payloads)
    assert set(answers) == {"stored", "full"}
    kept = [position for position, answer in enumerate(answers) if answer == "stored"]
    assert store.lookup(keys) == sum(1 << position for position in kept)
    store.unlock([keys[position] for position in kept])
    assert store.load(keys, [MIB] * 20)[1] == [payloads[position] for position in kept]
    store.delete(keys)
    store.at_rest()
    assert store.store(keys[:3], payloads[:3]) == ["stored"] * 3


def test_what_a_full_server_evicts_is_a_miss(valkey, session, many):
    server = valkey(maxmemory="12mb", maxmemory_policy="allkeys-lru")
    store = session(port=server.port)
    keys, payloads = many(40, MIB)
    assert store.store(keys, payloads) == ["stored"] * 40
    bits, buffers = store.load(keys, [MIB] * 40)
    assert 0 < bits.bit_count() < 40
    assert buffers == [payload for position, payload in enumerate(payloads) if bits >> position & 1]
    statistics = store.adapter.statistics()
    assert statistics.missing == 40 - bits.bit_count()
    assert statistics.objects == bits.bit_count()


def test_our_capacity_holds_where_the_server_has_none(valkey, session, many):
    server = valkey()
    store = session(port=server.port, capacity_bytes=5 * record_bytes(many(1)[0][0], 1000))
    keys, payloads = many(20, 1000)
    for position in range(20):
        assert store.store(keys[position : position + 1], payloads[position : position + 1]) == ["stored"]
    store.at_rest()
    assert server.say("DBSIZE") == b":5\r\n"
    assert store.load(keys, [1000] * 20)[0] == 0b11111 << 15


def test_a_replica_refuses_writes_and_is_used_again_as_a_master(valkey, session, many):
    server = valkey()
    store = session(port=server.port)
    keys, payloads = many(2)
    store.store(keys[:1], payloads[:1])
    server.say("REPLICAOF", "127.0.0.1", "1")
    assert store.store(keys[1:], payloads[1:]) == ["retry"]
    assert store.load(keys[:1], [100])[0] == 1
    server.say("REPLICAOF", "NO", "ONE")
    assert store.store(keys[1:], payloads[1:]) == ["stored"]


def test_a_server_that_still_loads_is_an_error_and_then_works(valkey, many, opened):
    server = valkey(loading_process_events_interval_bytes="1024")
    backend = opened(port=server.port)
    keys, payloads = many(1500, 2000)
    write(backend, keys, payloads)
    server.say("CONFIG", "SET", "key-load-delay", "20000")  # half a minute, until it is told otherwise
    reload = threading.Thread(target=server.say, args=("DEBUG", "RELOAD"))
    reload.start()
    answers = set()
    while reload.is_alive() and "LOADING" not in answers:
        [found] = backend.find(keys[:1])
        answers.add("LOADING" if isinstance(found, StoreError) and "LOADING" in str(found) else type(found).__name__)
    assert "LOADING" in answers
    server.say("CONFIG", "SET", "key-load-delay", "0")
    reload.join(30)
    assert backend.find(keys) == [True] * 1500


def test_another_type_under_our_name_is_a_miss_and_a_store_replaces_it(valkey, session, key):
    server = valkey()
    store = session(port=server.port)
    server.say("LPUSH", named(key(1)), "a list")
    assert store.lookup([key(1)]) == 0
    assert store.load([key(1)], [5])[0] == 0
    store.at_rest()
    assert store.adapter.statistics().foreign == 1
    assert server.say("EXISTS", named(key(1))) == b":0\r\n"
    server.say("LPUSH", named(key(2)), "a list")
    assert store.store([key(2)], [b"bytes"]) == ["stored"]


# --- bad records -----------------------------------------------------------------------------------------------------


def spoil(server, name, how, key):
    good = encode_header(key, b"y" * 100) + b"y" * 100
    other = ObjectKey(b"o" * 32, "model", 0)
    spoiled = {
        "flipped": good[:-1] + b"z",
        "torn": good[:-1],
        "short": good[:10],
        "torn in its key": good[:70],
        "long": good + b"!",
        "foreign": b"KVCORELX" + good[8:],
        "other key": encode_header(other, b"y" * 100) + b"y" * 100,
        "far too long": good + bytes(9 * MIB),
    }[how]
    server.say("SET", name, spoiled)


@pytest.mark.parametrize(
    "how", ["flipped", "torn", "short", "torn in its key", "long", "foreign", "other key", "far too long"]
)
def test_a_bad_record_is_a_miss_and_gone_and_its_neighbours_are_not(valkey, session, many, how):
    server = valkey()
    store = session(port=server.port)
    keys, payloads = many(3)
    store.store(keys, payloads)
    spoil(server, named(keys[1]), how, keys[1])
    bits, buffers = store.load(keys, [100] * 3)
    assert bits in ((0b101, 0b001) if how == "far too long" else (0b101,))
    assert buffers == [payloads[0], payloads[2]][: bits.bit_count()]
    store.at_rest()
    assert server.say("EXISTS", named(keys[1])) == b":0\r\n"
    assert store.adapter.statistics().defects == 1
    assert store.store(keys, payloads) == ["present", "stored", "present"]


def test_a_bad_record_is_replaced_by_a_store(valkey, key, opened):
    server = valkey()
    backend = opened(port=server.port)
    for how in ("torn", "short", "long", "foreign", "other key"):
        spoil(server, named(key(1)), how, key(1))
        assert write(backend, [key(1)], [b"y" * 100]) == [StoreAnswer.STORED]


@pytest.mark.parametrize("defect", [Defect.FLIPPED, Defect.TORN, Defect.OTHER_SIZE])
def test_a_discard_keeps_a_newer_record(valkey, key, defect, opened):
    server = valkey()
    backend = opened(port=server.port)
    if defect is Defect.OTHER_SIZE:
        write(backend, [key(1)], [b"long payload"])
        assert read(backend, [key(1)], 3)[0] == [defect]
        server.say("DEL", named(key(1)))
    write(backend, [key(1)], [b"new"])  # by another process, after the read and before the discard
    backend.discard(key(1), defect)
    assert read(backend, [key(1)], 3) == ([None], [b"new"])


def test_a_discard_that_is_overtaken_in_the_middle_removes_nothing(valkey, key, monkeypatch, opened):
    server = valkey()
    backend = opened(port=server.port)
    spoil(server, named(key(1)), "flipped", key(1))
    good = encode_header(key(1), b"new") + b"new"
    inner = backend._say

    def overtaken(wire, commands, more_bytes=0):
        if commands[0] == [b"*1\r\n$5\r\nMULTI\r\n"]:
            server.say("SET", named(key(1)), good)
        return inner(wire, commands, more_bytes)

    monkeypatch.setattr(backend, "_say", overtaken)
    backend.discard(key(1), Defect.FLIPPED)
    assert read(backend, [key(1)], 3) == ([None], [b"new"])


def test_an_intact_record_of_another_length_is_a_miss_and_goes(valkey, session, key):
    server = valkey()
    store = session(port=server.port)
    store.store([key(1)], [b"payload"])
    assert store.load([key(1)], [3])[0] == 0
    store.at_rest()
    assert server.say("EXISTS", named(key(1))) == b":0\r\n"
