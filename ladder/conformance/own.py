"""kvcore as a peer: the real `L1Cache` on a real arena, and the real `CacheLayout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from kvcore.answers import Answer
from kvcore.bitmap import bits
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.ladder.conformance.peer import LEASE_UNITS, PeerCache, PrefixRule
from kvcore.leases import Owner
from kvcore.memory import PlainArena, Slot

OBJECT_BYTES = 64


def _key(number: int) -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, "model", 0)


def _owner(name: str) -> Owner:
    return Owner(name, 1, "read")


class OwnCache:
    """An `L1Cache`; time is a number, a copy is an I/O hold."""

    def __init__(self, room: int) -> None:
        self.l1 = L1Cache(PlainArena(room * OBJECT_BYTES), LruPolicy)
        self._now = 0
        self._temporary: dict[tuple[str, int], bool] = {}
        self._copies: dict[int, Slot] = {}

    def reserve_write(self, tag: str, keys: Sequence[int], temporary: bool) -> list[str]:
        named = [_key(key) for key in keys]
        answers, _ = self.l1.reserve_write(
            tag, named, OBJECT_BYTES, deadline_ns=self._now + LEASE_UNITS, temporary=temporary
        )
        granted = [key for key, answer in zip(keys, answers, strict=True) if answer is Answer.RESERVED]
        self._temporary.update({(tag, key): temporary for key in granted})
        return [answer.value for answer in answers]

    def begin_copy(self, copy: int, tag: str, key: int) -> str:
        (slot,) = self.l1.hold_write("", tag, [_key(key)])
        if slot is None:
            return "unknown"
        self._copies[copy] = slot
        return "copying"

    def end_copy(self, copy: int, value: int) -> str:
        slot = self._copies.pop(copy)
        self.l1.view(slot)[:] = bytes([value]) * OBJECT_BYTES
        self.l1.unhold("", [slot])
        return "ended"

    def finish_write(self, tag: str, key: int) -> str:
        return self.l1.finish_write(tag, [_key(key)], temporary=self._temporary.get((tag, key), False))[0].value

    def publish_and_read(self, tag: str, owner: str, key: int) -> str:
        temporary = self._temporary.get((tag, key), False)
        (answer,) = self.l1.finish_write_and_reserve_read(
            tag, [_key(key)], [_owner(owner)], temporary=temporary, deadline_ns=self._now + LEASE_UNITS
        )
        return answer.value

    def abort_write(self, tag: str, key: int) -> str:
        return self.l1.abort_write(tag, [_key(key)])[0].value

    def reserve_read(self, owner: str, key: int) -> str:
        return self.l1.reserve_read(_owner(owner), [_key(key)], deadline_ns=self._now + LEASE_UNITS)[0].value

    def read(self, owner: str, key: int) -> int | None:
        (slot,) = self.l1.hold_read("", _owner(owner), [_key(key)])
        if slot is None:
            return None
        value = self.l1.view(slot)[0]
        self.l1.unhold("", [slot])
        return int(value)

    def finish_read(self, owner: str, key: int) -> str:
        return self.l1.finish_read(_owner(owner), [_key(key)])[0].value

    def delete(self, key: int) -> str:
        return self.l1.delete([_key(key)])[0].value

    def pass_time(self, units: int) -> None:
        self._now += units
        self.l1.expire(self._now)

    def resident(self) -> list[int]:
        return [key.chunk_hash[0] for key in self.l1.resident_keys()]

    def used(self) -> int:
        self.l1.check()
        return self.l1.statistics().bytes_used // OBJECT_BYTES

    def close(self) -> None:
        """Nothing outlives the object."""


class OwnPrefixRule:
    """`CacheLayout`, with blocks of one token."""

    def fold(self, lookup: Mapping[str, Any]) -> list[int]:
        rows = [sum(1 << chunk for chunk in row) for row in lookup["present"]]
        return list(bits(_layout(lookup).fold(rows, lookup["chunks"], lookup["prompt_tokens"])))

    def unfold(self, lookup: Mapping[str, Any], length: int) -> list[list[int]]:
        return [list(bits(row)) for row in _layout(lookup).unfold(length, lookup["prompt_tokens"])]


def _layout(lookup: Mapping[str, Any]) -> CacheLayout:
    groups = tuple(ObjectGroup(GroupKind(kind), 1, 1, window) for kind, window in lookup["rows"])
    return CacheLayout(groups, 1, lookup["chunk_tokens"])


class Own:
    """The peer."""

    name = f"kvcore {version('kvcore')}"
    means: Mapping[str, Mapping[str, Sequence[str]]] = {}
    prefix: PrefixRule | None = OwnPrefixRule()

    def cache(self, room: int) -> PeerCache:
        return OwnCache(room)
