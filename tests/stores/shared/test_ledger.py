"""The ledger: sums, order of age, parking, and a heap that does not grow with what has gone."""

from __future__ import annotations

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2.ledger import Ledger
from kvcore.quota import Quota


def key(number, salt=""):
    return ObjectKey(b"%032d" % number, "m", 0, 0, salt)


@pytest.fixture
def used():
    return set()


@pytest.fixture
def ledger(used):
    made = Ledger(used.__contains__, capacity_bytes=100)
    yield made
    made.check()


def fill(ledger, count, size=10):
    for number in range(count):
        ledger.note(key(number), size, number)


def test_room_is_made_oldest_first_and_only_as_much_as_is_needed(ledger):
    fill(ledger, 10)
    ledger.touch(key(0), 50)
    room = ledger.admit(key(99), 25)
    assert room.victims == [key(1), key(2), key(3)]
    assert (ledger.bytes_used, ledger.bytes_leaving, ledger.bytes_reserved) == (100, 30, 25)
    for victim in room.victims:
        ledger.forget(victim)
    ledger.settle(key(99), room.reserved_bytes)
    ledger.note(key(99), 25, 60)
    assert (ledger.bytes_used, ledger.bytes_leaving, ledger.bytes_reserved) == (95, 0, 0)


def test_replacing_reserves_only_the_difference(ledger):
    fill(ledger, 10)
    room = ledger.admit(key(3), 10)
    assert (room.victims, room.reserved_bytes) == ([], 0)
    assert ledger.admit(key(3), 12).reserved_bytes == 2


def test_what_cannot_fit_evicts_nothing(ledger, used):
    fill(ledger, 10)
    assert ledger.admit(key(99), 101) is None
    used.update(key(number) for number in range(9))
    assert ledger.admit(key(99), 20) is None
    assert ledger.bytes_leaving == 0
    assert ledger.admit(key(99), 10).victims == [key(9)]


def test_what_is_parked_comes_back_when_its_use_ends(ledger, used):
    fill(ledger, 10)
    used.update(key(number) for number in range(10))
    assert ledger.admit(key(99), 10) is None
    used.clear()
    assert ledger.admit(key(99), 10) is None  # nobody has said so
    ledger.unpark(key(4))
    ledger.unpark(key(2))
    ledger.unpark(key(77))
    assert ledger.admit(key(99), 20).victims == [key(2), key(4)]


def test_one_record_evicts_a_bounded_number_and_the_surplus_goes_apart(used):
    ledger = Ledger(used.__contains__, capacity_bytes=1000)
    ledger.begin_scan()
    for number in range(2000):
        ledger.seen(key(number), 1, number)
    ledger.end_scan(True)
    assert ledger.admit(key(9999), 1) is None
    gone = 0
    while keys := ledger.surplus(64):
        assert keys == [key(number) for number in range(gone, gone + len(keys))]
        gone += len(keys)
        for victim in keys:
            ledger.forget(victim)
    assert (gone, ledger.bytes_used) == (1000, 1000)
    ledger.check()


def test_a_scan_forgets_what_is_not_there_unless_it_was_touched_since(ledger, used):
    fill(ledger, 5)
    ledger.begin_scan()
    ledger.seen(key(0), 10, 0)
    ledger.note(key(1), 10, 9)  # written while the scan was past its place
    ledger.touch(key(3), 9)  # found by a lookup
    used.add(key(2))
    ledger.end_scan(True)
    assert set(ledger.keys()) == {key(0), key(1), key(2), key(3)}


def test_a_scan_does_not_bring_back_what_was_removed_meanwhile(ledger):
    fill(ledger, 2)
    ledger.begin_scan()
    ledger.forget(key(0))
    for number in range(2):
        ledger.seen(key(number), 10, 0)
    ledger.end_scan(True)
    assert ledger.keys() == [key(1)]
    ledger.begin_scan()
    ledger.seen(key(0), 10, 0)
    ledger.end_scan(True)
    assert ledger.keys() == [key(0)]


def test_a_scan_never_makes_old_what_we_have_used(ledger):
    fill(ledger, 10)
    ledger.touch(key(0), 100)
    ledger.begin_scan()
    for number in range(10):
        ledger.seen(key(number), 10, 0)
    ledger.end_scan(True)
    assert ledger.admit(key(99), 10).victims == [key(1)]


def test_more_keys_than_the_limit_are_not_remembered(used):
    ledger = Ledger(used.__contains__, keys_max=3)
    fill(ledger, 5)
    assert ledger.objects == 3
    ledger.forget(key(4))
    ledger.check()


def test_rescans_are_wanted_after_so_much_was_written(used):
    ledger = Ledger(used.__contains__, capacity_bytes=100, rescan_bytes=20)
    for number in range(2):
        assert not ledger.wants_scan
        room = ledger.admit(key(number), 10)
        ledger.settle(key(number), room.reserved_bytes)
    assert ledger.wants_scan
    ledger.begin_scan()
    assert not ledger.wants_scan
    ledger.end_scan(True)
    assert not ledger.wants_scan


def test_a_quota_evicts_the_tenants_own_and_leaves_no_trace_of_tenants_that_left(used):
    ledger = Ledger(used.__contains__, quota=Quota({"a": 20}))
    for number in range(2):
        ledger.note(key(number, "a"), 10, number)
        ledger.note(key(number, "b"), 10, number)
    assert ledger.admit(key(9, "b"), 1000).victims == []
    assert ledger.admit(key(9, "a"), 10).victims == [key(0, "a")]
    assert ledger.admit(key(9, "a"), 21) is None
    ledger.check()


def test_a_record_of_one_byte_more_than_the_quota_evicts_nothing(used):
    ledger = Ledger(used.__contains__, quota=Quota({"a": 20}))
    assert ledger.admit(key(9, "a"), 21) is None
    ledger.note(key(0, "a"), 10, 0)
    assert ledger.admit(key(9, "a"), 21) is None
    assert ledger.admit(key(9, "a"), 20).victims == [key(0, "a")]
    ledger.check()


def test_the_heap_does_not_grow_with_what_has_gone(ledger):
    for number in range(20_000):
        ledger.note(key(number), 10, number)
        ledger.forget(key(number))
    assert len(ledger._ages._heap) <= 1024
