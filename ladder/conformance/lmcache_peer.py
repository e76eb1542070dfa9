"""LMCache as a peer: its own `L1Manager` on its own memory, and its own bitmap functions.

Theory of operation
-------------------
This module imports LMCache and nothing of kvcore, so that it runs in an interpreter of LMCache's own (child.py). Every
call is one call of the library; its answers, the members of `L1Error`, are handed on by name, and `MEANS` says what
they stand for. Three things the library has no call for:

    begin_copy      A writer copies into the memory object that `reserve_write` gave it. The adapter asks whether the
                    reservation is alive, as a careful writer would if it could.
    read            A reader reads the memory object that `reserve_read` gave it, at any later time.
    pass_time       Locks run out by a clock inside the compiled `TTLLock`. `cache` gives them ten minutes and resets
                    those whose time has come by the run's own count, which is what an expired lock looks like:
                    `is_locked` is false and the next `lock` counts from one. `real_cache` waits instead.

Windows are turned into chunks as `KVLayerGroupsManager` does it, rounded up; a recurrent row has a window of one chunk,
as the text of `bitmap_ops.fold` has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.bitmap_ops import fold_grouped, unfold_grouped
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager

OBJECT_BYTES = 4096
LEASE_UNITS = 2
TTL_S, UNIT_S = 2, 1.2  # one unit is well within the TTL, two are beyond it
NEVER_S = 600
KEYS = 16
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([OBJECT_BYTES])], dtypes=[torch.uint8])

_PUBLISH = {"KEY_NOT_EXIST": ["unknown"], "KEY_IN_WRONG_STATE": ["expired"]}
MEANS: dict[str, dict[str, list[str]]] = {
    "reserve_write": {
        "SUCCESS": ["reserved"],
        "KEY_NOT_WRITABLE": ["resident", "busy"],
        "OUT_OF_MEMORY": ["no_space"],
    },
    "finish_write": {"SUCCESS": ["published", "discarded"], **_PUBLISH},
    "publish_and_read": {"SUCCESS": ["published"], "SUCCESS (another object)": ["discarded"], **_PUBLISH},
    "abort_write": {"SUCCESS": ["aborted"], **_PUBLISH},
    "reserve_read": {"SUCCESS": ["reserved"], "KEY_NOT_EXIST": ["unknown"]},
    "finish_read": {
        "SUCCESS": ["released"],
        "KEY_IN_WRONG_STATE": ["expired", "unknown"],
        "KEY_NOT_EXIST": ["expired", "unknown"],
    },
    "delete": {"SUCCESS": ["deleted"], "KEY_IS_LOCKED": ["locked"], "KEY_NOT_EXIST": ["unknown"]},
}


def _key(number: int) -> Any:
    return ObjectKey(bytes([number]) * 32, "model", 0)


class LmcacheCache:
    """One `L1Manager`. `waits`: time passes by waiting."""

    def __init__(self, room: int, waits: bool) -> None:
        memory = L1MemoryManagerConfig(room * OBJECT_BYTES, False, align_bytes=OBJECT_BYTES, shm_name="")
        ttl = TTL_S if waits else NEVER_S
        self._manager = L1Manager(L1ManagerConfig(memory, write_ttl_seconds=ttl, read_ttl_seconds=ttl))
        self._waits = waits
        self._now = 0
        self._locked: dict[Any, int] = {}
        self._granted: dict[tuple[str, int], Any] = {}
        self._reading: dict[tuple[str, int], Any] = {}
        self._copies: dict[int, Any] = {}

    def reserve_write(self, tag: str, keys: Sequence[int], temporary: bool) -> list[str]:
        named = [_key(key) for key in keys]
        answers = self._manager.reserve_write(named, [temporary] * len(keys), LAYOUT, tag)
        for number, key in zip(keys, named, strict=True):
            if answers[key][1] is not None:
                self._granted[tag, number] = answers[key][1]
                self._lock(self._manager._get_staging(key, tag).write_lock)
        return [answers[key][0].name for key in named]

    def begin_copy(self, copy: int, tag: str, key: int) -> str:
        staged = self._manager._get_staging(_key(key), tag)
        if staged is None or not staged.write_lock.is_locked():
            return "unknown"
        self._copies[copy] = self._granted[tag, key]
        return "copying"

    def end_copy(self, copy: int, value: int) -> str:
        self._copies.pop(copy).raw_data.fill_(value)
        return "ended"

    def finish_write(self, tag: str, key: int) -> str:
        return str(self._manager.finish_write([_key(key)], tag)[_key(key)].name)

    def publish_and_read(self, tag: str, owner: str, key: int) -> str:
        answer, memory = self._manager.finish_write_and_reserve_read([_key(key)], 1, tag)[_key(key)]
        self._read_begun(owner, key, memory)
        other = memory is not None and memory is not self._granted.get((tag, key))
        return f"{answer.name} (another object)" if other else str(answer.name)

    def abort_write(self, tag: str, key: int) -> str:
        return str(self._manager.finish_write_and_delete([_key(key)], tag)[_key(key)].name)

    def reserve_read(self, owner: str, key: int) -> str:
        answer, memory = self._manager.reserve_read([_key(key)])[_key(key)]
        self._read_begun(owner, key, memory)
        return str(answer.name)

    def _read_begun(self, owner: str, key: int, memory: Any) -> None:
        if memory is not None:
            self._reading[owner, key] = memory
            self._lock(self._manager.get_object_state(_key(key)).read_lock)

    def read(self, owner: str, key: int) -> int | None:
        memory = self._reading.get((owner, key))
        return None if memory is None else int(memory.raw_data[0])

    def finish_read(self, owner: str, key: int) -> str:
        return str(self._manager.finish_read([_key(key)])[_key(key)].name)

    def delete(self, key: int) -> str:
        return str(self._manager.delete([_key(key)])[_key(key)].name)

    def _lock(self, lock: Any) -> None:
        self._locked[lock] = self._now

    def pass_time(self, units: int) -> None:
        if self._waits:
            time.sleep(units * UNIT_S)
            return
        self._now += units
        for lock in [lock for lock, since in self._locked.items() if self._now - since >= LEASE_UNITS]:
            lock.reset()
            del self._locked[lock]

    def resident(self) -> list[int]:
        return [key for key in range(KEYS) if self._manager.get_object_state(_key(key)) is not None]

    def used(self) -> int:
        return int(self._manager.get_memory_usage()[0]) // OBJECT_BYTES

    def close(self) -> None:
        self._manager.close()


class LmcachePrefixRule:
    """`fold_grouped` and `unfold_grouped`."""

    def fold(self, lookup: Mapping[str, Any]) -> list[int]:
        rows = []
        for present in lookup["present"]:
            rows.append(Bitmap(lookup["chunks"]))
            rows[-1].batched_set(present)
        return [0] + [bit + 1 for bit in fold_grouped(rows, _windows(lookup)).get_indices_list()]

    def unfold(self, lookup: Mapping[str, Any], length: int) -> list[list[int]]:
        return [row.get_indices_list() for row in unfold_grouped(length, lookup["chunks"], _windows(lookup))]


def _windows(lookup: Mapping[str, Any]) -> list[int]:
    """In chunks, per row."""
    size = lookup["chunk_tokens"]
    fixed = {"full": -1, "recurrent": 1}
    return [-(-window // size) if kind == "window" else fixed[kind] for kind, window in lookup["rows"]]


class Lmcache:
    """The peer."""

    name = f"LMCache {version('lmcache')}"
    means = MEANS
    prefix = LmcachePrefixRule()

    def cache(self, room: int) -> LmcacheCache:
        return LmcacheCache(room, waits=False)

    def real_cache(self, room: int) -> LmcacheCache:
        """Its locks run out by its own clock."""
        return LmcacheCache(room, waits=True)
