"""Checks of how results come: once, by kind, announced, per key and in order."""

from __future__ import annotations

from kvcore.l2.adapter import PRESENT, STORED, TaskId
from kvcore.l2.checks.bed import Bed, require

_LARGE_BATCH = 1000


async def what_was_stored_is_loaded_back(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(5)
    require("answers of a store", await client.store(keys, payloads), [STORED] * 5)
    require("keys found", await client.found(keys), 0b11111)
    require("what is loaded", await client.load(keys, [100] * 5), (0b11111, payloads))


async def nothing_found_is_an_empty_bitmap(bed: Bed) -> None:
    client = await bed.open()
    require("a lookup of an unknown key", await client.lookup([bed.key("never stored")]), 0)
    require("a load of an unknown key", (await client.load([bed.key("never stored")], [10]))[0], 0)


async def the_answers_of_a_store_are_given_once(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    task = client.adapter.submit_store(keys, [memoryview(payloads[0])])
    require("answers", await client.stored(task), [STORED])
    require("a second time", task in client.adapter.pop_completed_stores(), False)


async def the_bitmap_of_a_lookup_is_given_once(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    task = client.adapter.submit_lookup_and_lock(keys)
    require("bits", await client.looked_up(task), 1)
    require("a second time", client.adapter.take_lookup(task), None)
    client.adapter.submit_unlock(keys)


async def the_bitmap_of_a_load_is_given_once(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    task = client.adapter.submit_load(keys, [memoryview(bytearray(100))])
    require("bits", await client.loaded(task), 1)
    require("a second time", client.adapter.take_load(task), None)


async def a_task_that_nobody_knows_answers_none(bed: Bed) -> None:
    client = await bed.open()
    unknown = TaskId(client.adapter.submit_lookup_and_lock([]) + 1_000_000)
    require("an unknown lookup", client.adapter.take_lookup(unknown), None)
    require("an unknown load", client.adapter.take_load(unknown), None)
    load = client.adapter.submit_load([], [])
    require("a load asked for as a lookup", client.adapter.take_lookup(load), None)


async def each_kind_of_work_has_its_own_notice(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    await client.announced("store", 1)
    require("notices of other kinds after a store", _seen(client.notices), {"store"})
    await client.found(keys)
    await client.announced("lookup", 1)
    require("notices after a lookup", _seen(client.notices), {"store", "lookup"})
    await client.load(keys, [100])
    await client.announced("load", 1)


async def no_notice_comes_inside_a_submit(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    before = dict(client.notices)
    client.adapter.submit_store(keys, [memoryview(payloads[0])])
    client.adapter.submit_lookup_and_lock([bed.key("unknown")])
    client.adapter.submit_load([bed.key("unknown")], [memoryview(bytearray(1))])
    require("notices before the loop ran", client.notices, before)
    for kind, count in before.items():
        await client.announced(kind, count + 1)


async def an_empty_batch_completes(bed: Bed) -> None:
    client = await bed.open()
    require("a store of nothing", await client.store([], []), [])
    require("a lookup of nothing", await client.lookup([]), 0)
    require("a load of nothing", await client.load([], []), (0, []))


async def task_numbers_are_not_used_twice(bed: Bed) -> None:
    client = await bed.open()
    tasks = [client.adapter.submit_lookup_and_lock([]) for _ in range(50)]
    tasks += [client.adapter.submit_load([], []) for _ in range(50)]
    require("different task numbers", len(set(tasks)), 100)


async def a_batch_is_answered_per_key(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(6)
    await client.store(keys[1::2], payloads[1::2])
    require("keys found", await client.found(keys), 0b101010)
    bits, buffers = await client.load(keys, [100] * 6)
    require("keys loaded", bits, 0b101010)
    require("their bytes", buffers[1::2], payloads[1::2])
    answers = await client.store(keys, payloads)
    require("answers for those that were not there", answers[::2], [STORED] * 3)
    require("answers for those that were", set(answers[1::2]) <= {STORED, PRESENT}, True)


async def a_large_batch_keeps_its_order(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(_LARGE_BATCH, 40)
    require("answers", await client.store(keys, payloads), [STORED] * _LARGE_BATCH)
    mixed = [key for number in range(0, 100, 10) for key in (keys[number], bed.key(f"missing {number}"))]
    require("every second one", await client.found(mixed), sum(1 << position for position in range(0, 20, 2)))
    bits, buffers = await client.load(list(reversed(keys)), [40] * _LARGE_BATCH)
    require("all bits", bits, (1 << _LARGE_BATCH) - 1)
    require("the bytes in order", buffers == payloads[::-1], True)


async def a_key_twice_in_a_store_is_answered_twice(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(2)
    answers = await client.store([keys[0], keys[1], keys[0]], [payloads[0], payloads[1], payloads[0]])
    require("answers", answers, [STORED, STORED, PRESENT])
    require("what is there", (await client.load(keys, [100] * 2))[1], payloads)


async def a_key_twice_in_a_load_fills_both_buffers(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    require("both", await client.load(keys * 2, [100, 100]), (0b11, payloads * 2))


async def a_key_twice_in_a_lookup_has_both_bits(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    require("both bits", await client.lookup(keys * 2), 0b11)
    client.adapter.submit_unlock(keys * 2)
    require("locks left", client.adapter.usage().locked, 0)


def _seen(notices: dict[str, int]) -> set[str]:
    return {kind for kind, count in notices.items() if count}


CHECKS = (
    what_was_stored_is_loaded_back,
    nothing_found_is_an_empty_bitmap,
    the_answers_of_a_store_are_given_once,
    the_bitmap_of_a_lookup_is_given_once,
    the_bitmap_of_a_load_is_given_once,
    a_task_that_nobody_knows_answers_none,
    each_kind_of_work_has_its_own_notice,
    no_notice_comes_inside_a_submit,
    an_empty_batch_completes,
    task_numbers_are_not_used_twice,
    a_batch_is_answered_per_key,
    a_large_batch_keeps_its_order,
    a_key_twice_in_a_store_is_answered_twice,
    a_key_twice_in_a_load_fills_both_buffers,
    a_key_twice_in_a_lookup_has_both_bits,
)
