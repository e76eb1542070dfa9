"""The memory pool's bookkeeping, against a walk of everything it holds."""

from __future__ import annotations

import random

from kvcore.l2.nixl_pool import MemoryPool, PoolRecord
from kvcore.memory import PlainArena

UNIT = 4096


def pool_of(units: int) -> MemoryPool:
    return MemoryPool(PlainArena(units * UNIT, UNIT))


def put(pool: MemoryPool, name: bytes, units: int = 1, owner: str = "writer") -> PoolRecord | str:
    made = pool.reserve(owner, name, units * UNIT, 1)
    if isinstance(made, PoolRecord):
        assert pool.commit(owner, made.number, True, 1)
    return made


def test_a_record_is_there_when_it_is_committed_and_not_before() -> None:
    pool = pool_of(4)
    made = pool.reserve("a", b"x", 10, 1)
    assert isinstance(made, PoolRecord)
    assert pool.find(b"x", 1) is None
    assert pool.reserve("b", b"x", 10, 1) == "busy"
    assert not pool.commit("b", made.number, True, 1), "it is another owner's"
    assert pool.commit("a", made.number, True, 1)
    assert pool.find(b"x", 1) == 10
    assert pool.reserve("b", b"x", 10, 1) == "present"


def test_what_an_owner_holds_goes_back_when_he_ends() -> None:
    pool = pool_of(4)
    put(pool, b"read")
    pool.reserve("dead", b"written", 2 * UNIT, 1)
    pool.pin("dead", b"read", 1)
    assert pool.arena.bytes_free == UNIT
    pool.leave("dead")
    assert pool.arena.bytes_free == 3 * UNIT
    assert put(pool, b"other", 4) != "full", "nothing is pinned any more"
    pool.check()


def test_room_is_made_by_evicting_what_was_not_used_for_longest_and_never_what_is_pinned() -> None:
    pool = pool_of(3)
    for name in (b"1", b"2", b"3"):
        put(pool, name)
    pool.find(b"1", 2)
    pool.pin("reader", b"2", 2)
    put(pool, b"4")
    assert [record.name for record in pool.records()] == [b"1", b"2", b"4"]
    assert pool.reserve("writer", b"5", 3 * UNIT, 3) == "full"
    assert pool.reserve("writer", b"6", 4 * UNIT, 3) == "full"
    assert pool.find(b"2", 3) == UNIT
    pool.check()


def test_a_pinned_record_that_is_replaced_keeps_its_room_until_its_reader_is_done() -> None:
    pool = pool_of(3)
    put(pool, b"x")
    old = pool.pin("reader", b"x", 1)
    assert old is not None
    put(pool, b"x", 2)
    assert pool.find(b"x", 1) == 2 * UNIT
    assert pool.arena.bytes_free == 0
    pool.remove(b"x", old.number)
    assert pool.find(b"x", 1) == 2 * UNIT, "a newer one is not removed by the number of an older one"
    pool.release("reader")
    assert pool.arena.bytes_free == UNIT
    pool.check()


def test_the_sums_hold_after_anything() -> None:
    draws = random.Random(1)
    pool = pool_of(16)
    open_writes: list[tuple[str, int]] = []
    for step in range(3000):
        owner, name = f"owner{draws.randrange(3)}", b"%d" % draws.randrange(8)
        what = draws.randrange(7)
        if what <= 1:
            made = pool.reserve(owner, name, draws.randrange(1, 5 * UNIT), step)
            if isinstance(made, PoolRecord):
                open_writes.append((owner, made.number))
        elif what == 2 and open_writes:
            pool.commit(*open_writes.pop(draws.randrange(len(open_writes))), draws.random() < 0.8, step)
        elif what == 3:
            pool.pin(owner, name, step)
        elif what == 4:
            pool.release(owner)
        elif what == 5:
            pool.remove(name, None)
        elif draws.random() < 0.2:
            pool.release(owner)
            pool.leave(owner)
        pool.check()
    for number in range(3):
        pool.release(f"owner{number}")
        pool.leave(f"owner{number}")
    assert pool.arena.bytes_free + sum(record.slot.extent for record in pool.records()) == 16 * UNIT
