"""Checks of names, lengths and buffers: any key, any length, and no byte beside the one that was meant."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.errors import CallerError
from kvcore.l2.adapter import STORED
from kvcore.l2.checks.bed import Bed, CheckFailedError, payload, require

_NAMES: tuple[str, ...] = (
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/",
    "a/b",
    "a\\b",
    "nul\0nul",
    "line\nline",
    "*?[]",
    "%2e%2e",
    " ",
    "\r\n$5",
)
_NAMES += (
    "x" * 128,
    "x" * 4000,
    "ü€漢字🙂",
    "CON",
    ".tmp-ab-1",
    "kvcore-l2.json",
    "a" * 255,
    "A" * 255,
    "{tag}",
    "\ud800",
)
_LENGTHS = (0, 1, 63, 64, 4095, 4096, 65537)
_LARGE_BYTES = 2 << 20


async def hostile_names_are_harmless(bed: Bed) -> None:
    client = await bed.open()
    keys = [bed.key("hostile", salt=name) for name in _NAMES] + [bed.key("hostile", model=name) for name in _NAMES[1:]]
    keys = [key for key in keys if _is_legal(key.cache_salt) and _is_legal(key.model_name)]
    payloads = [payload(number, 33) for number in range(len(keys))]
    require("answers", await client.store(keys, payloads), [STORED] * len(keys))
    require("all of them", await client.load(keys, [33] * len(keys)), ((1 << len(keys)) - 1, payloads))
    require("listed", {key for key in client.listed() if bed.mine(key)} == set(keys), True)


def _is_legal(name: str) -> bool:
    return len(name.encode("utf-8", "surrogatepass")) <= 4096


async def keys_that_differ_in_one_field_are_different_objects(bed: Bed) -> None:
    client = await bed.open()
    keys = [
        bed.key(1),
        bed.key(2),
        bed.key(1, model="x"),
        bed.key(1, rank=1),
        bed.key(1, group=1),
        bed.key(1, salt="x"),
    ]
    await client.store(keys[:1], [payload(0)])
    require("found before the others are stored", await client.found(keys), 0b1)
    require("answers", await client.store(keys[1:], [payload(number) for number in range(1, 6)]), [STORED] * 5)
    require("each its own bytes", (await client.load(keys, [100] * 6))[1], [payload(number) for number in range(6)])


async def payloads_of_any_length_come_back(bed: Bed) -> None:
    client = await bed.open()
    keys = [bed.key(f"length {length}") for length in _LENGTHS]
    payloads = [payload(number, length) for number, length in enumerate(_LENGTHS)]
    require("answers", await client.store(keys, payloads), [STORED] * len(keys))
    bits, buffers = await client.load(keys, list(_LENGTHS))
    require("all bits", bits, (1 << len(keys)) - 1)
    require("their bytes", buffers == payloads, True)


async def a_large_payload_comes_back(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(3, _LARGE_BYTES)
    require("answers", await client.store(keys, payloads), [STORED] * 3)
    bits, buffers = await client.load(keys, [_LARGE_BYTES] * 3)
    require("all bits", bits, 0b111)
    require("their bytes", buffers == payloads, True)


async def a_load_writes_its_buffer_and_nothing_beside_it(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(3)
    await client.store(keys, payloads)
    arena = bytearray(b"\xaa" * 400)
    view = memoryview(arena)
    task = client.adapter.submit_load(keys, [view[20:120], view[140:240], view[260:360]])
    require("all bits", await client.loaded(task), 0b111)
    guard = b"\xaa" * 20
    wanted = guard + payloads[0] + guard + payloads[1] + guard + payloads[2] + b"\xaa" * 40
    require("the whole arena", arena, wanted)


async def a_load_of_what_is_not_there_leaves_its_buffer_alone(bed: Bed) -> None:
    client = await bed.open()
    keys, payloads = bed.many(3)
    await client.store([keys[0], keys[2]], [payloads[0], payloads[2]])
    bits, buffers = await client.load(keys, [100] * 3)
    require("the bits of the neighbours", bits, 0b101)
    require("the buffer of the missing key", buffers[1], b"\xee" * 100)
    require("the neighbours' bytes", buffers[::2], payloads[::2])


async def a_buffer_is_free_once_its_store_is_complete(bed: Bed) -> None:
    client = await bed.open()
    buffer = bytearray(payload(1))
    await client.stored(client.adapter.submit_store([bed.key(1)], [memoryview(buffer)]))
    buffer[:] = bytes(100)
    require("what was stored", (await client.load([bed.key(1)], [100]))[1], [payload(1)])


async def buffers_of_wider_items_are_taken_as_bytes(bed: Bed) -> None:
    client = await bed.open()
    source = memoryview(bytearray(payload(3, 96))).cast("I").cast("B").cast("I", (4, 6))
    target = bytearray(96)
    require("answers", await client.stored(client.adapter.submit_store([bed.key(3)], [source])), [STORED])
    require("bits", await client.loaded(client.adapter.submit_load([bed.key(3)], [memoryview(target).cast("Q")])), 1)
    require("bytes", target, payload(3, 96))


async def wrong_buffers_are_the_callers_mistake(bed: Bed) -> None:
    client = await bed.open()
    good = memoryview(bytearray(8))
    key = bed.key(1)
    for keys, buffers in (([key], []), ([key, bed.key(2)], [good]), ([key], [good[::2]])):
        _refused(lambda keys=keys, buffers=buffers: client.adapter.submit_store(keys, buffers))  # type: ignore[misc]
        _refused(lambda keys=keys, buffers=buffers: client.adapter.submit_load(keys, buffers))  # type: ignore[misc]
    _refused(lambda: client.adapter.submit_load([key], [memoryview(b"read-only")]))
    require("what is there afterwards", await client.found([key, bed.key(2)]), 0)


async def a_load_of_another_length_is_a_miss_and_not_a_remembered_yes(bed: Bed) -> None:
    client = await bed.open()
    key = bed.key("odd")
    for wrong_bytes in (0, 99, 101, 5000):
        require("answer", await client.store([key], [payload(1)]), [STORED])
        require(f"a load of {wrong_bytes} bytes", (await client.load([key], [wrong_bytes]))[0], 0)
        await client.at_rest()
        require("a lookup afterwards", await client.found([key]), 0)


async def a_store_of_another_length_replaces_the_object(bed: Bed) -> None:
    client = await bed.open()
    key = bed.key("a")
    for length in (100, 10, 180, 100):
        require(f"a store of {length} bytes", await client.store([key], [payload(1, length)]), [STORED])
        require("what is there", await client.load([key], [length]), (1, [payload(1, length)]))


def _refused(call: Callable[[], object]) -> None:
    try:
        call()
    except CallerError:
        return
    raise CheckFailedError("buffers that cannot work were taken instead of raising CallerError")


CHECKS = (
    hostile_names_are_harmless,
    keys_that_differ_in_one_field_are_different_objects,
    payloads_of_any_length_come_back,
    a_large_payload_comes_back,
    a_load_writes_its_buffer_and_nothing_beside_it,
    a_load_of_what_is_not_there_leaves_its_buffer_alone,
    a_buffer_is_free_once_its_store_is_complete,
    buffers_of_wider_items_are_taken_as_bytes,
    wrong_buffers_are_the_callers_mistake,
    a_load_of_another_length_is_a_miss_and_not_a_remembered_yes,
    a_store_of_another_length_replaces_the_object,
)
