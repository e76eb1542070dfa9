"""What a server refuses, to the unit: each limit is allowed, one more is not. And what peers must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.errors import CallerError, ConfigError, PeerError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.service.checks import LimitChecks, RefusedError
from kvcore.service.identity import identity_of, layout_of, placement_of
from kvcore.service.limits import check_message
from kvcore.service.peers import ConnectionTable
from kvcore.service.protocol import ErrorCode, ServerLimits
from kvcore.service.region import Region

LIMITS = ServerLimits(batch_cells_max=16, hash_bytes_max=5, name_chars_max=3, salt_chars_max=4)
CHECKS = LimitChecks(LIMITS)
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, 2, 64), ObjectGroup(GroupKind.WINDOW, 4, 32, 9)), 2, 8)
IDENTITY = identity_of(Namespace("m", chunk_tokens=8), LAYOUT, Placement("chunk", 3))


@pytest.mark.parametrize(
    ("check", "largest", "over"),
    [
        (CHECKS.name, "abc", "abcd"),
        (CHECKS.salt, "abcd", "abcde"),
        (CHECKS.batch, [0] * 16, [0] * 17),
        (CHECKS.bits, b"\x01\x80", b"\x01\x80\x00"),
        (CHECKS.hashes, [b"12345", b"1"], [b"1", b"123456"]),
    ],
)
def test_the_limit_itself_is_allowed_and_one_more_is_too_large(
    check: Callable[[Any], object], largest: Any, over: Any
) -> None:
    check(largest)
    with pytest.raises(RefusedError) as refused:
        check(over)
    assert refused.value.code is ErrorCode.TOO_LARGE


def test_a_bit_set_may_fill_its_last_byte() -> None:
    """A batch of 9 cells takes two bytes; a third is refused whatever its bits."""
    checks = LimitChecks(ServerLimits(batch_cells_max=9))
    assert checks.bits(b"\x01\x01") == 0b1_00000001
    with pytest.raises(RefusedError, match="bits"):
        checks.bits(b"\x00\x00\x00")


def test_no_hashes_are_within_every_limit() -> None:
    CHECKS.hashes([])


def test_a_refusal_names_the_value_and_the_limit() -> None:
    with pytest.raises(RefusedError, match="17 cells of a batch; the limit is 16"):
        CHECKS.batch([0] * 17)
    with pytest.raises(RefusedError, match="24 bits of a batch; the limit is 16"):
        CHECKS.bits(bytes(3))


def test_the_largest_batch_fits_into_a_frame() -> None:
    limits = ServerLimits()
    cell = msgspec.msgpack.encode((2**62, b"h" * limits.hash_bytes_max))
    assert limits.batch_cells_max * len(cell) <= limits.frame_bytes_max


def test_a_message_of_the_limit_is_carried_and_a_longer_one_is_the_callers_mistake() -> None:
    check_message(b"1234", 4)
    with pytest.raises(CallerError, match="5 bytes exceeds the limit of 4"):
        check_message(b"12345", 4)
    with pytest.raises(CallerError, match="not bytearray"):
        check_message(bytearray(1), 4)  # type: ignore[arg-type]


# --- the arena as clients in the same process see it


@pytest.mark.parametrize(("offset", "size"), [(0, 256), (255, 1), (256, 0), (0, 0), (64, 100)])
def test_what_lies_inside_the_arena_can_be_viewed(offset: int, size: int) -> None:
    arena = PlainArena(256)
    whole = Region(arena).view_range(0, 256)
    whole[:] = bytes(range(256))
    assert bytes(Region(arena).view_range(offset, size)) == bytes(range(256))[offset : offset + size]


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, -1), (0, 257), (256, 1), (1, 256), (1 << 40, 0)])
def test_what_a_reply_names_outside_the_arena_is_the_peers_mistake(offset: int, size: int) -> None:
    with pytest.raises(PeerError, match="the server named bytes"):
        Region(PlainArena(256)).view_range(offset, size)


# --- at most once


def test_a_request_is_new_once_and_older_ones_are_duplicates() -> None:
    table = ConnectionTable(2)
    table.greet(1, 5)
    assert [table.admit(1, request) for request in (5, 6, 6, 4, 9, 7)] == [False, True, False, False, True, False]


def test_a_second_handshake_never_moves_the_count_back() -> None:
    table = ConnectionTable(2)
    table.greet(1, 5)
    table.greet(1, 3)
    assert table.admit(1, 4) is False
    table.greet(1, 8)
    assert table.admit(1, 8) is False


def test_the_connection_that_was_silent_longest_is_forgotten_first() -> None:
    table = ConnectionTable(2)
    table.greet(1, 0)
    table.greet(2, 0)
    table.admit(1, 1)
    table.greet(3, 0)
    assert [table.known(connection) for connection in (1, 2, 3)] == [True, False, True]
    assert len(table) == 2


@pytest.mark.parametrize("connections_max", [0, -1])
def test_a_server_has_room_for_a_connection(connections_max: int) -> None:
    with pytest.raises(CallerError, match="at least one"):
        ConnectionTable(connections_max)
    ConnectionTable(1).greet(1, 1)


# --- identities


def test_an_identity_describes_the_layout_and_the_placement() -> None:
    assert layout_of(IDENTITY) == LAYOUT
    for mode in ("rank", "chunk"):
        placement = Placement(mode, 3)
        made = placement_of(identity_of(Namespace("m", chunk_tokens=8), LAYOUT, placement))
        assert (made.mode, made.servers) == (mode, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout_fingerprint": "0" * 32}, "have the fingerprint"),
        ({"ranks": 3}, "have the fingerprint"),
        ({"chunk_tokens": 16}, "have the fingerprint"),
        ({"chunk_tokens": 6}, "no multiple"),
    ],
)
def test_a_description_that_is_not_what_its_fingerprint_names_is_refused(change: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout_of(msgspec.structs.replace(IDENTITY, **change))


def test_unknown_kinds_and_placements_are_refused() -> None:
    shape = msgspec.structs.replace(IDENTITY.groups[0], kind="ring")
    with pytest.raises(ConfigError, match="'ring' is no kind of group"):
        layout_of(msgspec.structs.replace(IDENTITY, groups=(shape,)))
    with pytest.raises(ConfigError, match="'star' is no placement"):
        placement_of(msgspec.structs.replace(IDENTITY, placement_mode="star"))


@pytest.mark.parametrize("chunk_tokens", ["8", "4096"])
def test_equal_chunk_sizes_agree_however_large(chunk_tokens: str) -> None:
    layout = CacheLayout(LAYOUT.groups, 2, int(chunk_tokens))
    identity = identity_of(Namespace("m", chunk_tokens=int(chunk_tokens)), layout, Placement("rank", 1))
    assert identity.chunk_tokens == int(chunk_tokens)


def test_namespace_and_layout_must_have_chunks_of_one_size() -> None:
    with pytest.raises(ConfigError, match="chunks of 4 tokens, the layout of 8"):
        identity_of(Namespace("m", chunk_tokens=4), LAYOUT, Placement("rank", 1))
