"""Checks of an object's life: deletion, listing, locks, two at once, limits, the end of an adapter and the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import FULL, PRESENT, STORED
from kvcore.l2.checks.bed import Bed, CheckFailedError, Client, noise, payload, require
from kvcore.quota import Quota

_USERS = 4
_LIMITED_KEYS = 64
_LIMITED_LENGTH = 16 * 1024
_LIMIT_BYTES = 16 * (_LIMITED_LENGTH + 8 * 1024)
"""Room for 16 objects at least, in a store whose records cost up to 8 KiB more than their payload."""


# -- deletion, listing, usage


async def a_deleted_object_is_gone(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(3)
    await client.store(keys, payloads)
    client.adapter.delete([keys[1], bed.key("unknown"), keys[1]])
    await client.at_rest()
    require("found", await client.found(keys), 0b101)
    require("loaded", (await client.load(keys, [100] * 3))[0], 0b101)
    require("listed", _listed(bed, client), {keys[0], keys[2]})


async def a_deleted_key_can_be_stored_again_at_once(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    for number in range(5):
        client.adapter.delete(keys)
        require("answer", await client.store(keys, [payload(number)]), [STORED])
        require("the new bytes", (await client.load(keys, [100]))[1], [payload(number)])


async def a_key_deleted_while_it_is_written_is_gone_afterwards(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1)
    task = client.adapter.submit_store(keys, [memoryview(payloads[0])])
    client.adapter.delete(keys)
    await client.stored(task)
    await client.at_rest()
    require("found", await client.found(keys), 0)


async def the_list_names_what_can_be_loaded(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(20)
    require("listed before", _listed(bed, client), set())
    await client.store(keys, payloads)
    require("listed", _listed(bed, client), set(keys))


async def usage_grows_with_what_is_stored_and_shrinks_with_what_is_deleted(bed: Bed) -> None:
    client = await bed.open()
    await client.at_rest()  # a shared store is counted in the background
    before = client.adapter.usage()
    keys, payloads = bed.many(8, 4096)
    await client.store(keys, payloads)
    usage = client.adapter.usage()
    require("bytes for eight objects", usage.bytes_used - before.bytes_used >= 8 * 4096, True)
    require("objects", usage.objects - before.objects, 8)
    client.adapter.delete(keys)
    await client.at_rest()
    usage = client.adapter.usage()
    require("bytes afterwards", usage.bytes_used, before.bytes_used)
    require("objects afterwards", usage.objects, before.objects)


async def a_store_that_is_repeated_costs_no_room(bed: Bed) -> None:
    client = await bed.open()
    await client.at_rest()  # a shared store is counted in the background
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    once = client.adapter.usage()
    answers = await client.store(keys, payloads)
    require("answer", answers[0] in (STORED, PRESENT), True)
    require("bytes", client.adapter.usage().bytes_used, once.bytes_used)


async def storing_and_deleting_often_leaves_nothing(bed: Bed) -> None:
    client = await bed.open()
    await client.at_rest()  # a shared store is counted in the background
    before = client.adapter.usage()
    keys, payloads = bed.many(10)
    for _ in range(10):
        require("answers", await client.store(keys, payloads), [STORED] * 10)
        client.adapter.delete(keys)
    await client.at_rest()
    after = client.adapter.usage()
    require("bytes", after.bytes_used, before.bytes_used)
    require("objects", after.objects, before.objects)
    require("listed", _listed(bed, client), set())


# -- two at once


async def two_stores_of_one_key_leave_one_whole_object(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(1, 50_000)
    tasks = [client.adapter.submit_store(keys, [memoryview(payloads[0])]) for _ in range(3)]
    answers = [await client.stored(task) for task in tasks]
    require("answers", sorted(answer.value for [answer] in answers), ["present", "present", "stored"])
    require("bytes", (await client.load(keys, [50_000]))[1] == payloads, True)


async def a_lookup_during_a_store_answers_all_the_same(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(4)
    task = client.adapter.submit_store(keys, [memoryview(data) for data in payloads])
    bits = await client.found(keys)
    require("bits of keys that were asked for", bits >> 4, 0)
    require("answers", await client.stored(task), [STORED] * 4)
    require("found afterwards", await client.found(keys), 0b1111)


async def overlapping_users_get_right_bytes_or_a_miss(bed: Bed) -> None:
    client = await bed.open()

    async def user(number: int) -> None:
        for step in range(5):
            numbers = [(number * 3 + step * 2 + offset) % 8 for offset in range(3)]
            keys = [bed.key(one) for one in numbers]
            await client.store(keys, [payload(one) for one in numbers])
            bits, buffers = await client.load(keys, [100] * 3)
            for position, one in enumerate(numbers):
                if bits >> position & 1:
                    require("bytes of a loaded object", buffers[position], payload(one))
            if step % 2:
                client.adapter.delete(keys[:1])

    async with asyncio.TaskGroup() as users:
        for number in range(_USERS):
            users.create_task(user(number))
    await client.at_rest()
    require("locks left", client.adapter.usage().locked, 0)


async def what_another_process_stored_is_found(bed: Bed) -> None:
    one, other = await bed.open(), await bed.second()
    keys, payloads = bed.many(3)
    require("answers", await one.store(keys, payloads), [STORED] * 3)
    require("found by the other", await other.found(keys), 0b111)
    require("loaded by the other", await other.load(keys, [100] * 3), (0b111, payloads))


async def what_another_process_deleted_is_a_miss(bed: Bed) -> None:
    one, other = await bed.open(), await bed.second()
    keys, payloads = bed.many(2)
    await one.store(keys, payloads)
    other.adapter.delete(keys[:1])
    await other.at_rest()
    require("loaded", (await one.load(keys, [100] * 2))[0], 0b10)
    require("stored again", (await one.store(keys[:1], payloads[:1]))[0], STORED)


async def two_processes_that_store_one_key_leave_it_whole(bed: Bed) -> None:
    one, other = await bed.open(), await bed.second()
    keys, payloads = bed.many(4, 30_000)
    views = [memoryview(data) for data in payloads]
    tasks = [(client, client.adapter.submit_store(keys, views)) for client in (one, other)]
    answers = [await client.stored(task) for client, task in tasks]
    for position, pair in enumerate(zip(*answers)):  # whoever loses the race may be told to come again
        require(
            f"one of {[answer.value for answer in pair]} of key {position}", STORED in pair or PRESENT in pair, True
        )
    for client in (one, other):
        bits, buffers = await client.load(keys, [30_000] * 4)
        require("bits", bits, 0b1111)
        require("bytes", buffers == payloads, True)


# -- locks


async def a_locked_object_survives_a_deletion_until_it_is_unlocked(bed: Bed) -> None:
    client = await bed.open()
    bed.strong(client)
    keys, payloads = bed.many(1)
    await client.store(keys, payloads)
    require("locked twice", await client.lookup(keys * 2), 0b11)
    client.adapter.delete(keys)
    require("a lookup afterwards", await client.lookup(keys), 0)
    client.adapter.submit_unlock(keys)
    require("its holder still loads it", await client.load(keys, [100]), (1, payloads))
    client.adapter.submit_unlock(keys)
    await client.at_rest()
    require("after the last unlock", (await client.load(keys, [100]))[0], 0)


async def what_a_lookup_found_this_process_does_not_evict(bed: Bed) -> None:
    client = await bed.limited(_LIMIT_BYTES)
    bed.keeps_own_locks(client)
    keys, payloads = _limited(bed)
    await client.store(keys[:2], payloads[:2])
    require("found", await client.lookup(keys[:2]), 0b11)
    for number in range(2, _LIMITED_KEYS):
        await client.store([keys[number]], [payloads[number]])
    await client.at_rest()
    require("loaded", (await client.load(keys[:2], [_LIMITED_LENGTH] * 2))[0], 0b11)
    client.adapter.submit_unlock(keys[:2])


async def an_unlock_without_a_lock_is_harmless(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(2)
    await client.store(keys[:1], payloads[:1])
    client.adapter.submit_unlock([keys[0], bed.key("unknown")])
    require("locked", await client.lookup(keys[:1]), 1)
    client.adapter.submit_unlock(keys[1:])
    require("loaded", (await client.load(keys[:1], [100]))[0], 1)
    client.adapter.submit_unlock(keys[:1])
    require("locks left", client.adapter.usage().locked, 0)


# -- limits


async def a_limit_is_kept_by_evicting_the_oldest(bed: Bed) -> None:
    client = await bed.limited(_LIMIT_BYTES)
    keys, payloads = _limited(bed)
    for number in range(_LIMITED_KEYS):
        require("answer", await client.store([keys[number]], [payloads[number]]), [STORED])
    await client.at_rest()
    require("within the limit", client.adapter.usage().bytes_used <= _LIMIT_BYTES, True)
    require("the first one", await client.found(keys[:1]), 0)
    require("the last ones", await client.found(keys[-8:]), 0xFF)


async def what_is_larger_than_the_limit_is_refused(bed: Bed) -> None:
    client = await bed.limited(_LIMIT_BYTES)
    keys, payloads = bed.many(2)
    await client.store(keys, payloads)
    require("answer", await client.store([bed.key("huge")], [noise(9, 2 * _LIMIT_BYTES)]), [FULL])
    require("the others", await client.found(keys), 0b11)


async def a_tenants_quota_evicts_only_its_own(bed: Bed) -> None:
    small = bed.key(0, salt="small").cache_salt
    client = await bed.limited(8 * _LIMIT_BYTES, Quota({small: _LIMIT_BYTES}))
    other = bed.key("other", salt="large")
    await client.store([other], [noise(1, _LIMITED_LENGTH)])
    keys = [bed.key(number, salt="small") for number in range(_LIMITED_KEYS)]
    for number, key in enumerate(keys):
        require("answer", await client.store([key], [noise(number, _LIMITED_LENGTH)]), [STORED])
    await client.at_rest()
    require("the tenant's first one", await client.found(keys[:1]), 0)
    require("the tenant's last one", await client.found(keys[-1:]), 1)
    require("the other tenant's, older than all of them", await client.found([other]), 1)


# -- the end and the next beginning


async def close_with_work_outstanding_announces_nothing_more(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(6, 10_000)
    await client.store(keys[:3], payloads[:3])
    before = dict(client.notices)
    store = client.adapter.submit_store(keys[3:], [memoryview(data) for data in payloads[3:]])
    load = client.adapter.submit_load(keys[:3], [memoryview(bytearray(10_000)) for _ in range(3)])
    lookup = client.adapter.submit_lookup_and_lock(keys)
    client.close()
    await client.at_rest()
    require("notices", client.notices, before)
    require("a store", store in client.adapter.pop_completed_stores(), False)
    require("a load", client.adapter.take_load(load), None)
    require("a lookup", client.adapter.take_lookup(lookup), None)


async def a_closed_adapter_takes_no_work_and_closes_again(bed: Bed) -> None:
    client = await bed.open()
    client.close()
    client.close()
    client.adapter.submit_unlock([bed.key(1)])
    for call in _calls_of(client):
        try:
            call()
        except CallerError:
            continue
        raise CheckFailedError("a closed adapter has taken work instead of raising CallerError")


async def a_restart_finds_the_records_and_no_locks(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(6)
    await client.store(keys, payloads)
    await client.lookup(keys[:3])
    client = await bed.restart(client)
    require("found", await client.found(keys), 0b111111)
    require("loaded", await client.load(keys, [100] * 6), (0b111111, payloads))
    require("locks", client.adapter.usage().locked, 0)
    require("stored again", set(await client.store(keys, payloads)) <= {STORED, PRESENT}, True)


async def a_restart_does_not_bring_back_what_was_deleted(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(4)
    await client.store(keys, payloads)
    client.adapter.delete(keys[2:])
    client = await bed.restart(client)
    require("found", await client.found(keys), 0b11)


async def a_restart_after_close_with_work_outstanding_serves_whole_objects(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(8, 20_000)
    client.adapter.submit_store(keys, [memoryview(data) for data in payloads])
    client.close()
    client = await bed.restart(client)
    bits, buffers = await client.load(keys, [20_000] * 8)
    for position in range(8):
        if bits >> position & 1:
            require("a whole object", buffers[position] == payloads[position], True)


def _limited(bed: Bed) -> tuple[list[ObjectKey], list[bytes]]:
    """More than the limit holds, and not to be compressed."""
    keys = [bed.key(number) for number in range(_LIMITED_KEYS)]
    return keys, [noise(number, _LIMITED_LENGTH) for number in range(_LIMITED_KEYS)]


def _calls_of(client: Client) -> tuple[Callable[[], object], ...]:
    adapter = client.adapter
    return (
        lambda: adapter.submit_store([], []),
        lambda: adapter.submit_lookup_and_lock([]),
        lambda: adapter.submit_load([], []),
        lambda: adapter.delete([]),
    )


def _listed(bed: Bed, client: Client) -> set[ObjectKey]:
    return {key for key in client.listed() if bed.mine(key)}


CHECKS = (
    a_deleted_object_is_gone,
    a_deleted_key_can_be_stored_again_at_once,
    a_key_deleted_while_it_is_written_is_gone_afterwards,
    the_list_names_what_can_be_loaded,
    usage_grows_with_what_is_stored_and_shrinks_with_what_is_deleted,
    a_store_that_is_repeated_costs_no_room,
    storing_and_deleting_often_leaves_nothing,
    two_stores_of_one_key_leave_one_whole_object,
    a_lookup_during_a_store_answers_all_the_same,
    overlapping_users_get_right_bytes_or_a_miss,
    what_another_process_stored_is_found,
    what_another_process_deleted_is_a_miss,
    two_processes_that_store_one_key_leave_it_whole,
    a_locked_object_survives_a_deletion_until_it_is_unlocked,
    what_a_lookup_found_this_process_does_not_evict,
    an_unlock_without_a_lock_is_harmless,
    a_limit_is_kept_by_evicting_the_oldest,
    what_is_larger_than_the_limit_is_refused,
    a_tenants_quota_evicts_only_its_own,
    close_with_work_outstanding_announces_nothing_more,
    a_closed_adapter_takes_no_work_and_closes_again,
    a_restart_finds_the_records_and_no_locks,
    a_restart_does_not_bring_back_what_was_deleted,
    a_restart_after_close_with_work_outstanding_serves_whole_objects,
)
