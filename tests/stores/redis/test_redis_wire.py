"""The wire alone, on sockets without a server: what is sent arrives whole, and no call outlasts its deadline."""

from __future__ import annotations

import socket
import threading

import pytest

from kvcore.l2 import redis_wire
from kvcore.l2.redis_wire import Deadline, Wire
from kvcore.runtime.clock import SystemClock

PARTS = [bytes([number % 251]) * (number * 997 % 60_000) for number in range(700)]  # more than one call takes
PATIENCE_S = 60
SHORT_S = 0.1


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


@pytest.fixture(params=[tcp_pair, socket.socketpair], ids=["tcp", "unix"])
def ends(request):
    ours, theirs = request.param()
    wire = Wire(ours, 0)
    yield wire, theirs
    wire.close()
    theirs.close()


class Still:
    """A clock that stands."""

    def now_ns(self):
        return 0


def deadline(seconds):
    return Deadline(SystemClock(), seconds)


def test_many_parts_arrive_in_order_and_whole(ends):
    wire, theirs = ends
    wanted = b"".join(PARTS)
    got = bytearray()

    def read():
        while len(got) < len(wanted):
            got.extend(theirs.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    wire.send([PARTS[:300], PARTS[300:]], deadline(PATIENCE_S))
    reader.join(PATIENCE_S)
    assert got == wanted


def test_values_that_come_together_are_told_apart(ends):
    wire, theirs = ends
    values = [bytes([number]) * (200 + 300 * number) for number in range(8)]  # some end within what comes along
    theirs.sendall(b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values))
    for value in values:
        into = memoryview(bytearray(len(value) - 100))
        assert wire.bulk_length(deadline(PATIENCE_S)) == len(value)
        assert wire.take(100, deadline(PATIENCE_S)) == value[:100]
        wire.fill(into, deadline(PATIENCE_S))
        wire.end_bulk(deadline(PATIENCE_S))
        assert into == value[100:]


def test_a_peer_that_reads_nothing_is_given_up(ends):
    wire, _ = ends
    with pytest.raises(TimeoutError):
        wire.send([[memoryview(bytes(64 << 20))]], deadline(SHORT_S))


def test_a_peer_that_says_nothing_is_given_up_also_after_a_longer_deadline(ends):
    wire, theirs = ends
    theirs.sendall(b"+OK\r\n")
    assert wire.answer(deadline(PATIENCE_S)) == "OK"
    with pytest.raises(TimeoutError):
        wire.answer(deadline(SHORT_S))


@pytest.mark.parametrize("whole_s", [1, 2, 20, 21])
def test_a_bound_just_below_a_whole_second_is_none_that_the_system_refuses(ends, whole_s):
    """A thousandth of a millisecond there rounds up to the next second."""
    wire, theirs = ends
    theirs.sendall(b"+OK\r\n")
    assert wire.answer(Deadline(Still(), (whole_s - 5e-7) / redis_wire._LATE)) == "OK"
