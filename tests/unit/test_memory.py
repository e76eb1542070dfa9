"""Arenas: aligned slots with generations of their own, over private, shared or no memory."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcore.errors import CallerError, ConfigError, PeerError
from kvcore.memory import BufferArena, PlainArena, SlotState, VirtualArena
from kvcore.runtime.shared_memory import SharedArena

CAPACITY = 64 * 1024


@pytest.fixture
def shared() -> Iterator[SharedArena]:
    arena = SharedArena(CAPACITY, secrets.token_hex(6))
    yield arena
    arena.close()


@pytest.mark.parametrize("capacity", [-5, 0, 63])
@pytest.mark.parametrize("make", [PlainArena, VirtualArena, SharedArena])
def test_an_arena_smaller_than_one_object_is_refused(make: type, capacity: int) -> None:
    with pytest.raises(ConfigError, match="cannot hold a single object"):
        make(capacity)


def test_an_alignment_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="power of two"):
        PlainArena(1024, alignment=48)


@pytest.mark.parametrize("size", [0, -1])
def test_an_object_without_a_positive_size_is_misuse(size: int) -> None:
    with pytest.raises(CallerError, match="positive size"):
        VirtualArena(1024).allocate(size)


def test_slots_are_aligned_in_memory_and_views_show_exactly_what_was_asked_for() -> None:
    arena = PlainArena(4096, alignment=256)
    slots = [arena.allocate(100), arena.allocate(300)]
    for slot in slots:
        assert slot is not None
        view = arena.view(slot)
        assert (view.nbytes, view.format, view.readonly) == (slot.size, "B", False)
        assert np.frombuffer(view, np.uint8).__array_interface__["data"][0] % 256 == 0
    assert arena.bytes_free == 4096 - 256 - 512


def test_generations_are_whole_numbers_that_count_upwards() -> None:
    arena = VirtualArena(1024)
    slots = [*arena.allocate_batch(64, "ab"), *arena.allocate_batch(64, "c")]
    assert repr([slot.generation for slot in slots]) == "[1, 2, 3]"


def test_a_slot_handed_out_again_has_a_higher_generation_and_is_another_object() -> None:
    arena = VirtualArena(64)
    first = arena.allocate(64)
    assert first is not None
    arena.free(first)
    second = arena.allocate(64)
    assert second is not None
    assert second is not first
    assert second.offset == first.offset
    assert second.generation > first.generation
    assert first.state is SlotState.FREE


def test_freeing_a_slot_twice_or_under_a_copy_is_our_own_bug() -> None:
    """R27 c: freed once."""
    arena = VirtualArena(1024)
    slot, held = arena.allocate_batch(64, "ab")
    arena.free(slot)
    with pytest.raises(AssertionError, match="freed twice"):
        arena.free(slot)
    held.holds = 1
    with pytest.raises(AssertionError, match="a copy touches it"):
        arena.free(held)


def test_a_full_arena_gives_as_many_slots_as_fit() -> None:
    arena = VirtualArena(200)
    assert arena.capacity_bytes == 192
    assert len(arena.allocate_batch(64, "abcd")) == 3
    assert arena.allocate(1) is None
    assert (arena.bytes_free, arena.largest_free) == (0, 0)


def test_a_virtual_arena_accounts_for_a_terabyte_and_has_no_bytes() -> None:
    arena = VirtualArena(1 << 40)
    slot = arena.allocate(1 << 39)
    assert slot is not None
    with pytest.raises(CallerError, match="virtual"):
        arena.view(slot)


def test_a_buffer_that_is_too_short_or_read_only_is_refused() -> None:
    with pytest.raises(CallerError):
        BufferArena(1024, memoryview(bytearray(512)))
    with pytest.raises(CallerError):
        BufferArena(1024, memoryview(bytes(1024)))


def test_another_process_reads_what_was_written_into_shared_memory(shared: SharedArena) -> None:
    slot = shared.allocate(5)
    assert slot is not None
    shared.view(slot)[:] = b"hello"
    code = (
        "import sys; from kvcore.runtime.shared_memory import SharedArena\n"
        "segment = SharedArena.attach(sys.argv[1], int(sys.argv[2]))\n"
        "span = segment.view_range(int(sys.argv[3]), 5); assert bytes(span) == b'hello'; span[:] = b'world'\n"
        "span.release(); segment.close()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, shared.segment, str(shared.capacity_bytes), str(slot.offset)],
        check=True,
        timeout=600,
    )
    assert bytes(shared.view(slot)) == b"world"
    with_name = SharedArena.attach(shared.segment, shared.capacity_bytes)  # the other process left the name alone
    assert bytes(with_name.view(slot)) == b"world"
    with_name.close()


def test_a_segment_that_exists_already_is_refused_and_left_alone(shared: SharedArena) -> None:
    slot = shared.allocate(4)
    assert slot is not None
    shared.view(slot)[:] = b"mine"
    with pytest.raises(ConfigError, match="exists already"):
        SharedArena(CAPACITY, shared.segment.removeprefix("kvcore-"))
    assert bytes(shared.view(slot)) == b"mine"
    SharedArena.attach(shared.segment, shared.capacity_bytes).close()


def test_the_creator_removes_the_name_and_closing_again_does_nothing() -> None:
    arena = SharedArena(CAPACITY, secrets.token_hex(6))
    segment = arena.segment
    view = memoryview(arena._buffer)  # a view that is still out does not keep the name
    arena.close()
    arena.close()
    with pytest.raises(PeerError, match="gone"):
        SharedArena.attach(segment, CAPACITY)
    view.release()


def test_a_segment_of_another_size_is_refused(shared: SharedArena) -> None:
    with pytest.raises(PeerError, match="another one"):
        SharedArena.attach(shared.segment, shared.capacity_bytes * 2)


def test_bytes_outside_the_segment_are_refused(shared: SharedArena) -> None:
    segment = SharedArena.attach(shared.segment, shared.capacity_bytes)
    for offset, size in ((-1, 1), (0, -1), (shared.capacity_bytes, 1)):
        with pytest.raises(PeerError, match="outside"):
            segment.view_range(offset, size)
    segment.close()


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 40, "ü"])
def test_a_name_that_could_leave_the_directory_is_refused(name: str) -> None:
    with pytest.raises(CallerError):
        SharedArena(CAPACITY, name)
    with pytest.raises(CallerError):
        SharedArena.attach(name, CAPACITY)


@pytest.mark.skipif(sys.platform != "linux", reason="segments are files only on Linux")
def test_segments_are_private_and_an_open_one_is_not_attached(shared: SharedArena) -> None:
    path = Path("/dev/shm", shared.segment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(PeerError, match="open to other users"):
        SharedArena.attach(shared.segment, shared.capacity_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved at creation only on Linux")
def test_memory_that_does_not_exist_is_refused_at_the_start_and_leaves_no_name() -> None:
    token = secrets.token_hex(6)
    with pytest.raises(ConfigError, match="smaller cache"):
        SharedArena(1 << 60, token)
    assert not Path("/dev/shm", f"kvcore-{token}").exists()
