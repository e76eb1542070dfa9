"""Real faults under the whole stack that a URL builds, with the deadline and the breaker it has when nothing is said.

Public reports R19 (a batch fails in its middle), R53 (a backend in trouble) and R54 (half of an entry is gone).

What a request may wait, `BOUND_S`: its lookup is answered at the store's deadline (2 s); where the lookup was
answered and the load hangs, the client's own time-outs end it (Redis: 1 s and the bytes; S3: 5 s), or, where the
client has none (a file system), the request's own deadline. `SLACK_S` is for a busy machine: what it guards against is
a wait without an end. Once the breaker is open the store is not asked at all: that is counted and needs no clock.

Expected each time: a cold answer or a shorter hit, never a wrong byte (`Stack.request` compares), an error counted, the
breaker open, then half-open, then closed, the store used again when it is back, and nothing held (the fixture looks).
"""

from __future__ import annotations

import signal
import socket

import pytest

DEADLINE_S = 2.0  # `kvcore.l2.open_options`
SLACK_S = 20.0
BOUND_S = 2 * DEADLINE_S + SLACK_S
S3_BOUND_S = DEADLINE_S + 2 * 5.0 + SLACK_S
CHUNKS = 4
FAILURES = 3  # that open the breaker
PATIENT = "timeout_s=20&connect_timeout_s=20&deadline_ms=30000"
"""Where no hang is meant: a busy machine shall be no fault of its own."""


def goes_cold(stack, bound_s=BOUND_S):
    """Requests are answered cold and in time; the breaker opens, and then the store is asked nothing."""
    before = stack.counts().io_errors
    longest_s = stack.until(lambda reply: reply.chunks == 0 and stack.guards().breaker_state == "open")
    guards = stack.guards()
    assert stack.counts().io_errors > before or guards.work_late > 0
    assert guards.breaker_opened >= 1
    assert longest_s < bound_s


def asks_again_by_itself(stack, bound_s=BOUND_S):
    """After its pause one call is let through; the store is still gone, so the breaker opens once more."""
    opened = stack.guards().breaker_opened

    def asked_again(_):
        """And not only that: where the pause was over before the next request, none has been refused yet."""
        guards = stack.guards()
        return guards.breaker_opened > opened and guards.breaker_refused >= 1

    assert stack.until(asked_again) < bound_s
    assert stack.guards().breaker_probes >= 1


def is_used_again(stack):
    """Cold or whole at first; in the end everything that the store has is served, and the breaker is closed."""
    stack.until(lambda reply: reply.chunks == CHUNKS)
    assert stack.guards().breaker_state == "closed"


def has_come_back_empty(stack):
    """What the store had is gone; what is stored from now on is found."""
    stack.until(lambda reply: stack.guards().breaker_state == "closed")
    assert stack.request().chunks == 0
    stack.fill()
    is_used_again(stack)


class Refusing:
    """A port that had a listener: whoever connects is refused."""

    def __init__(self, server):
        self.server = server

    def harm(self):
        self.server.kill()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((self.server.host, self.server.port), 5)

    def heal(self):
        self.server.start()


def test_a_redis_that_stands_still_for_longer_than_the_deadline(valkey, stack):
    """R53. SIGSTOP: its sockets still accept."""
    server = valkey()
    one = stack(f"redis://127.0.0.1:{server.port}/0")
    server.stop()
    goes_cold(one)
    asks_again_by_itself(one)
    server.go_on()
    is_used_again(one)


def test_a_redis_whose_client_would_wait_for_ever_is_bounded_by_the_deadline_alone(valkey, stack):
    """R53. The client's own time-outs are set far beyond the deadline, so its threads hang, and are left to drain."""
    server = valkey()
    one = stack(f"redis://127.0.0.1:{server.port}/0?timeout_s=600&connect_timeout_s=600")
    server.stop()
    goes_cold(one)
    guards = one.guards()
    assert guards.lookups_late >= 1
    assert guards.work_late >= FAILURES
    assert one.counts().work_inflight >= 1
    server.go_on()
    is_used_again(one)


def test_a_redis_that_refuses_and_comes_back_empty(valkey, stack):
    """R53: killed and started again on its port. What it had is gone; what is stored then is found."""
    server = valkey()
    one = stack(f"redis://127.0.0.1:{server.port}/0")
    fault = Refusing(server)
    fault.harm()
    goes_cold(one)
    asks_again_by_itself(one)
    fault.heal()
    has_come_back_empty(one)


def test_a_redis_that_restarts_between_two_requests_costs_no_error(valkey, stack):
    """R53. The idle connections are dead: the exchange is done once more on a fresh one."""
    server = valkey()
    one = stack(f"redis://127.0.0.1:{server.port}/0?{PATIENT}")
    errors = one.counts().io_errors
    server.restart()
    assert one.request().chunks == 0
    assert one.counts().io_errors == errors
    assert one.guards().breaker_opened == 0
    one.fill()


def test_a_redis_behind_a_blackhole(valkey, proxy, stack):
    """R53. What is sent is swallowed; connections seem to be made."""
    front = proxy(valkey().port)
    one = stack(f"redis://127.0.0.1:{front.port}/0")
    front.blackhole = True
    goes_cold(one)
    asks_again_by_itself(one)
    front.heal()
    is_used_again(one)


def test_a_redis_whose_values_break_off_is_a_shorter_hit(valkey, proxy, stack):
    """R19: the third value of a batch is cut off, each time. What came before it is served."""
    front = proxy(valkey().port)
    one = stack(f"redis://127.0.0.1:{front.port}/0?{PATIENT}")
    errors = one.counts().io_errors
    front.cut()
    front.reset_each = 5 * (64 << 10) // 2
    one.until(lambda reply: 0 < reply.chunks < CHUNKS)
    assert one.counts().io_errors > errors
    front.heal()
    is_used_again(one)


def test_a_store_batch_that_breaks_off_in_its_middle_is_finished_by_the_writeback(valkey, proxy, stack):
    """R19. The connection ends while the values go in; the write-back tries again, and no half of one is ever seen."""
    server = valkey()
    front = proxy(server.port)
    one = stack(f"redis://127.0.0.1:{front.port}/0?{PATIENT}")
    server.say("FLUSHALL")
    one.cache.drop_l1()
    front.cut()
    front.reset_after = 6  # in the middle of the answers to the first questions
    one.cache.store(list(range(64)), one.chunks)
    assert one.cache.flush(30.0)
    assert front.reset_after is None
    is_used_again(one)


def test_a_redis_that_lost_half_of_its_entries_is_a_shorter_hit_and_takes_them_again(valkey, stack):
    """R54. Name and payload are one entry here, so nothing can be half there: the record is whole, or a miss."""
    server = valkey()
    one = stack(f"redis://127.0.0.1:{server.port}/0?{PATIENT}")
    names = one.cache._thread.call(_names(one))
    server.say("DEL", *names[2:])
    assert one.request().chunks == 2
    one.fill()
    one.at_rest()
    server.say("SETRANGE", names[1], "0", b"\0" * 70)  # its header is gone, its payload is there
    assert one.request().chunks == 1
    one.fill()


def test_a_redis_at_its_memory_limit_gives_up_whole_entries(valkey, stack):
    """R54. The server evicts what it likes; each chunk is a hit or a miss, and never half of one."""
    server = valkey(maxmemory="3mb", maxmemory_policy="allkeys-random")
    one = stack(f"redis://127.0.0.1:{server.port}/0?{PATIENT}")
    for number in range(40):
        server.say("SET", f"other{number}", b"x" * 100_000)
    seen = {one.request().chunks for _ in range(4)}
    assert seen <= set(range(CHUNKS + 1))
    while one.request().chunks == CHUNKS:  # it draws its victims: one run in a hundred has spared all of ours so far
        number += 1
        server.say("SET", f"other{number}", b"x" * 100_000)
    assert one.guards().breaker_opened == 0  # a miss is no failure
    server.say("FLUSHALL")
    one.fill()


def test_an_s3_link_that_is_too_slow(seaweed, proxy, stack, s3_url):
    """R53. A trickle: each attempt ends at the client's time-out, and the request is answered with what has come."""
    front = proxy(seaweed.port)
    one = stack(s3_url(front.port), chunk_bytes=256 << 10)
    errors = one.counts().io_errors
    front.rate_bytes_per_s = 16 << 10
    assert one.until(lambda reply: reply.chunks < CHUNKS) < S3_BOUND_S
    assert one.counts().io_errors > errors or one.guards().work_late
    front.heal()
    front.cut()  # what still trickles
    is_used_again(one)


def test_an_s3_body_that_is_reset_in_its_middle(seaweed, proxy, stack, s3_url):
    """R19, R53. Each connection ends within the first body: no chunk comes, and none is taken for bad and removed."""
    front = proxy(seaweed.port)
    one = stack(s3_url(front.port), chunk_bytes=256 << 10)
    errors = one.counts().io_errors
    front.cut()
    front.reset_each = 100 << 10
    assert one.until(lambda reply: reply.chunks == 0 and one.counts().io_errors > errors) < S3_BOUND_S
    goes_cold(one, S3_BOUND_S)
    front.heal()
    front.cut()
    is_used_again(one)
    assert one.counts().deletes == 0


def test_a_memory_pool_that_stands_still_and_later_dies(pool, stack, stand_still):
    """R53. SIGSTOP: its socket still accepts. SIGKILL: its memory is gone too, and the next pool begins empty."""
    one = stack(pool.url)
    stand_still(pool.process.pid)
    goes_cold(one)
    pool.process.send_signal(signal.SIGCONT)
    is_used_again(one)
    pool.kill()
    goes_cold(one)
    pool.start()
    has_come_back_empty(one)


def test_a_file_system_that_hangs(mounts, tmp_path, stack):
    """R53. A read of a file cannot be given up: the request ends at its own deadline, and the read drains."""
    (tmp_path / "disk").mkdir()
    layer = mounts.layer(tmp_path / "disk")
    request_s = DEADLINE_S + 0.5
    one = stack(f"fs://{layer.path}/kv", request_s=request_s)
    layer.tell("read delay 60")  # until it is told otherwise
    # One piece of work: requests that want the same chunks wait for one read of them.
    hangs = lambda reply: reply.chunks == 0 and one.guards().work_late > 0 and one.counts().work_inflight == 1  # noqa: E731
    assert one.until(hangs) < request_s + SLACK_S
    layer.tell("")
    is_used_again(one)


async def _names(one):
    """Of the records, in the order of the chunks."""
    [pump] = one.cache._inner._storage._pumps
    adapter = pump.adapter
    while not hasattr(adapter, "_backend"):
        adapter = adapter.inner
    backend = adapter._backend
    while hasattr(backend, "inner"):
        backend = backend.inner
    hashes = one.cache._inner._hasher.hash_tokens(list(range(64)))
    known = adapter.keys()
    keys = {key.chunk_hash: key for key in known}
    return [backend._name(keys[chunk_hash]) for chunk_hash in hashes]
