"""`Index`: admission to the byte, who is evicted for whom, what each outcome of a write or deletion leaves behind."""

from __future__ import annotations

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2.index import Entry, Index, State
from kvcore.quota import Quota


def key(name: str, salt: str = "") -> ObjectKey:
    return ObjectKey(name.encode(), "m", 0, 0, salt)


def put(index: Index, name: str, record_bytes: int, salt: str = "") -> list[str] | None:
    """Write one record; the names of those that went for it, or None: no room."""
    admission = index.admit(key(name, salt), record_bytes - 10, record_bytes)
    if admission is None:
        return None
    for victim in admission.victims:
        index.deleted(victim, admission.entry)
    index.written(admission.entry)
    index.check()
    return [victim.key.chunk_hash.decode() for victim in admission.victims]


def entry(index: Index, name: str, salt: str = "") -> Entry:
    found = index.get(key(name, salt))
    assert found is not None
    return found


def names(index: Index) -> str:
    present = index.keys()
    return "".join(sorted(found.chunk_hash.decode() for found in present))


def filled(capacity_bytes: int = 100, limits: Quota | None = None) -> Index:
    """Records a (30), b (40) and c (30) of three uses in that order: exactly full at 100."""
    index = Index(capacity_bytes, limits)
    for name, record_bytes in (("a", 30), ("b", 40), ("c", 30)):
        assert put(index, name, record_bytes) == []
    return index


def test_an_entry_is_equal_to_itself_alone() -> None:
    """Who keeps an entry of a record that is gone must not take its successor's for it."""
    one, two = (Entry(key("a"), 20, 30, State.PRESENT) for _ in range(2))
    assert one != two
    assert len({one, two}) == 2


# --- room


def test_records_fit_to_the_last_byte() -> None:
    index = filled()
    assert (index.bytes_used, index.bytes_reserved, index.objects) == (100, 0, 3)
    assert put(filled(101), "d", 1) == []


@pytest.mark.parametrize(("wanted", "gone"), [(1, "a"), (30, "a"), (31, "ab"), (70, "ab"), (71, "abc"), (100, "abc")])
def test_no_more_go_than_are_needed_and_the_least_recently_used_first(wanted: int, gone: str) -> None:
    index = filled()
    assert put(index, "d", wanted) == list(gone)
    assert index.bytes_used == wanted + sum({"a": 30, "b": 40, "c": 30}[name] for name in "abc" if name not in gone)


def test_a_record_larger_than_the_store_evicts_nobody() -> None:
    index = filled()
    assert put(index, "d", 101) is None
    assert names(index) == "abc"


def test_a_store_without_a_capacity_takes_everything() -> None:
    index = Index(None)
    assert [put(index, name, 1 << 50) for name in "abc"] == [[], [], []]
    assert index.bytes_used == 3 << 50
    assert index.surplus() == []


def test_lookups_loads_and_touches_count_as_use() -> None:
    index = filled()
    index.lock(entry(index, "a"))
    index.unlock(entry(index, "a"))
    index.touch(entry(index, "b"))
    assert put(index, "d", 30) == ["c"]
    index.begin_load(entry(index, "a"))
    index.end_load(entry(index, "a"))
    assert put(index, "e", 40) == ["b"]


def test_what_is_locked_or_being_loaded_does_not_go_and_does_not_count_as_room() -> None:
    index = filled()
    index.lock(entry(index, "a"))
    index.lock(entry(index, "a"))
    index.begin_load(entry(index, "b"))
    assert index.locked == 1
    assert put(index, "d", 31) is None
    assert put(index, "d", 30) == ["c"]
    assert index.unlock(entry(index, "a")) is False
    assert (index.locked, put(index, "e", 31)) == (1, None), "one lock is left"
    assert index.unlock(entry(index, "a")) is False
    assert index.locked == 0
    assert index.end_load(entry(index, "b")) is False
    assert put(index, "e", 100) == ["d", "a", "b"]


def test_victims_are_marked_as_evicted_only_when_they_were_still_good() -> None:
    index = filled()
    good, doomed = entry(index, "a"), entry(index, "c")
    assert index.doom(doomed) is True
    assert put(index, "d", 60) == ["c", "a"], "a doomed one goes first, although it was used last"
    assert (good.evicted, doomed.evicted) == (True, False)


# --- replacing


@pytest.mark.parametrize(("new_bytes", "reserved_at_first"), [(20, 0), (40, 0), (55, 15)])
def test_a_replacement_reserves_what_it_needs_beyond_the_old_record(new_bytes: int, reserved_at_first: int) -> None:
    index = filled(120)
    admission = index.admit(key("b"), new_bytes - 10, new_bytes)
    assert admission is not None
    (old,) = admission.victims
    assert not old.evicted, "it was replaced"
    assert (index.bytes_used, index.bytes_reserved) == (100, reserved_at_first)
    assert index.visible(key("b")) is None
    index.deleted(old, admission.entry)
    assert (index.bytes_used, index.bytes_reserved) == (60, new_bytes)
    assert index.written(admission.entry) is False
    index.check()
    assert (index.bytes_used, index.bytes_reserved, index.objects) == (60 + new_bytes, 0, 3)
    assert index.visible(key("b")) is admission.entry


def test_running_writes_have_their_room_for_certain() -> None:
    index = Index(100)
    first = index.admit(key("a"), 50, 60)
    assert first is not None
    assert index.admit(key("b"), 31, 41) is None, "nothing of the running write can be evicted"
    second = index.admit(key("b"), 30, 40)
    assert second is not None
    assert index.bytes_reserved == 100
    index.not_written(first.entry)
    assert (index.bytes_reserved, index.get(key("a"))) == (40, None)
    index.written(second.entry)
    index.check()
    assert (index.bytes_used, index.bytes_reserved, names(index)) == (40, 0, "b")


# --- deletions


def test_a_doomed_record_is_invisible_at_once_and_goes_when_its_last_user_has_ended() -> None:
    index = filled()
    found = entry(index, "b")
    index.lock(found)
    index.begin_load(found)
    assert index.doom(found) is False
    assert (index.visible(key("b")), index.objects, names(index)) == (None, 2, "ac")
    assert index.unlock(found) is False, "it is still being loaded"
    assert index.end_load(found) is True
    index.begin_delete(found)
    assert (found.state, index.bytes_used) == (State.DELETING, 100), "what may be in the store is accounted"
    index.deleted(found)
    index.check()
    assert (index.bytes_used, index.get(key("b"))) == (60, None)


def test_a_deletion_asked_for_during_the_write_begins_when_it_has_ended() -> None:
    index = Index(100)
    admission = index.admit(key("a"), 50, 60)
    assert admission is not None
    admission.entry.doom_when_written = True
    assert index.written(admission.entry) is True
    assert (admission.entry.state, index.objects, index.bytes_used) == (State.DOOMED, 0, 60)


def test_a_record_that_could_not_be_deleted_keeps_its_room_and_is_the_next_victim() -> None:
    index = filled()
    stuck = entry(index, "b")
    index.doom(stuck)
    index.begin_delete(stuck)
    index.not_deleted(stuck)
    index.check()
    assert (stuck.state, index.bytes_used, names(index)) == (State.DOOMED, 100, "ac")
    assert put(index, "d", 40) == ["b"]


def test_a_write_that_failed_behind_a_deletion_leaves_the_room_empty() -> None:
    index = filled()
    admission = index.admit(key("d"), 20, 30)
    assert admission is not None
    (victim,) = admission.victims
    index.deleted(victim, admission.entry)
    index.not_written(admission.entry)
    index.check()
    assert (index.bytes_used, index.bytes_reserved, names(index)) == (70, 0, "bc")


def test_a_write_with_an_unknown_outcome_stays_accounted_until_it_is_deleted_for_certain() -> None:
    index = filled(120)
    admission = index.admit(key("d"), 40, 50)
    assert admission is not None
    (victim,) = admission.victims
    assert victim.key == key("a")
    again = index.perhaps_written(admission.entry, admission.victims)
    assert [doomed.key for doomed in again] == [key("d"), key("a")]
    assert index.bytes_used == 120, "a, b, c and the 20 bytes that were reserved beyond a"
    assert names(index) == "bc"
    for doomed in again:
        index.begin_delete(doomed)
        index.deleted(doomed)
    index.check()
    assert (index.bytes_used, index.bytes_reserved) == (70, 0)


def test_a_replacement_with_an_unknown_outcome_is_one_doomed_record() -> None:
    index = filled(150)
    admission = index.admit(key("b"), 60, 70)
    assert admission is not None
    again = index.perhaps_written(admission.entry, admission.victims)
    assert [(doomed.key, doomed.record_bytes) for doomed in again] == [(key("b"), 70)]
    index.check()
    assert index.bytes_used == 130


# --- tenants


def test_a_tenant_over_its_quota_gives_up_its_own_records_and_no_more_than_needed() -> None:
    index = Index(1000, Quota({"t": 100}))
    assert put(index, "x", 50) == []
    for name in "ab":
        assert put(index, name, 50, "t") == []
    assert put(index, "c", 50, "t") == ["a"]
    assert put(index, "d", 51, "t") == ["b", "c"]
    assert put(index, "e", 49, "t") == []
    assert put(index, "y", 901) == ["x", "d"], "a tenant without a limit is limited by the store alone"


def test_a_tenants_locked_records_leave_no_room_for_it_although_the_store_is_empty() -> None:
    index = Index(1000, Quota({}, default_bytes=100))
    assert put(index, "a", 60, "t") == []
    assert put(index, "b", 101, "t") is None
    index.lock(entry(index, "a", "t"))
    assert put(index, "b", 41, "t") is None
    assert put(index, "b", 40, "t") == []
    assert put(index, "c", 100, "u") == [], "each tenant has its own"


def test_what_a_tenant_has_lost_is_its_room_again() -> None:
    index = Index(1000, Quota({"t": 100}))
    admission = index.admit(key("a", "t"), 90, 100)
    assert admission is not None
    assert index.admit(key("b", "t"), 0, 10) is None, "a running write is charged"
    index.not_written(admission.entry)
    assert put(index, "a", 100, "t") == []
    gone = entry(index, "a", "t")
    index.doom(gone)
    index.begin_delete(gone)
    index.deleted(gone)
    assert put(index, "b", 100, "t") == []
    assert put(index, "b", 90, "t") == ["b"], "a replacement counts once"
    assert put(index, "c", 10, "t") == []


def test_a_deletion_that_failed_is_charged_to_its_tenant_again() -> None:
    index = Index(1000, Quota({"t": 100}))
    assert put(index, "a", 60, "t") == []
    stuck = entry(index, "a", "t")
    index.doom(stuck)
    index.begin_delete(stuck)
    index.not_deleted(stuck)
    assert put(index, "b", 40, "t") == []
    assert put(index, "c", 10, "t") == ["a"]


# --- what a start has found


def test_a_start_gives_up_exactly_what_is_beyond_the_capacity_oldest_first() -> None:
    index = Index(100)
    for name in "abcde":
        index.adopt(key(name), 20, 30)
    assert (index.objects, index.bytes_used) == (5, 150)
    victims = index.surplus()
    assert [victim.key for victim in victims] == [key("a"), key("b")]
    assert index.surplus() == [], "those are on their way"
    for victim in victims:
        index.deleted(victim)
    index.check()
    assert (index.bytes_used, names(index)) == (90, "cde")


def test_a_start_gives_up_what_is_beyond_a_tenants_quota() -> None:
    index = Index(1000, Quota({"t": 60}))
    for name in "abc":
        index.adopt(key(name, "t"), 20, 30)
    index.adopt(key("x"), 490, 500)
    assert [victim.key for victim in index.surplus()] == [key("a", "t")]
    assert names(index) == "bcx"
