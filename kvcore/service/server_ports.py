"""What a `CacheServer` is given: the storage it serves, and who proves that a process has died. Protocols only.

Who holds, announces and frees: see the objects behind them (`kvcore.storage`, `kvcore.runtime.deaths`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcore.leases import Owner
from kvcore.service.workers import WorkerStorage
from kvcore.session import Job


class ServerStorage(WorkerStorage, Protocol):
    """What the server needs of `Storage`."""

    def start_lookup(
        self,
        owner: Owner,
        hashes: Sequence[bytes],
        *,
        salt: str,
        prompt_tokens: int,
        masks: Sequence[int],
        skip_chunks: int,
        deadline_ns: int,
    ) -> Job: ...

    def release_owner(self, owner: Owner) -> int: ...

    def renew(self, hashes: Sequence[bytes], salt: str) -> None: ...

    def drop_l1(self) -> int: ...


class Deaths(Protocol):
    """Proves that a process has died (`kvcore.runtime.deaths.DeathWatch`)."""

    def watch(self, key: str, process: str, died: Callable[[], object]) -> bool: ...

    def forget(self, key: str) -> None: ...
