"""`EngineProbe`: where oracles look into the engine. Every hook is called synchronously and must not call back.

`rank` hooks run when the bytes move, on the device's compute stream; with a threaded device that is another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcore.sim.engine.step import StepEntry


class EngineProbe(Protocol):
    def block_allocated(self, block: int, request_id: str) -> None:
        """`block` left the free pool for `request_id`, who will write it."""
        ...

    def block_shared(self, block: int, request_id: str) -> None:
        """`request_id` took a reference to a block of the prefix cache; nobody will write it."""
        ...

    def block_freed(self, block: int, request_id: str) -> None:
        """`request_id` gave up its reference; others may still hold one."""
        ...

    def attends(self, rank: int, layer: int, entries: Sequence[StepEntry]) -> None:
        """`layer` is about to run for these requests: everything before their new tokens must be in place."""
        ...

    def forward_writes(self, rank: int, blocks: Sequence[int]) -> None:
        """One layer is about to write into these pages."""
        ...

    def forward_reads(self, rank: int, blocks: Sequence[int]) -> None:
        """One layer is about to read these pages."""
        ...

    def poisoned(self, rank: int, blocks: Sequence[int]) -> None:
        """These pages are about to be filled with the poison pattern: a write like any other."""
        ...

    def asked(self, request_id: str, local_tokens: int, answer: int | None) -> None:
        """The connector answered a question about external tokens."""
        ...

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None: ...

    def load_ended(self, request_id: str, valid_tokens: int, promised_tokens: int) -> None:
        """An asynchronous load, or a synchronous one that failed, has ended with this much valid prefix."""
        ...

    def preempted(self, request_id: str) -> None: ...

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        """Ended by itself with these generated tokens."""
        ...

    def request_aborted(self, request_id: str) -> None: ...


class NullProbe:
    """Looks at nothing."""

    def block_allocated(self, block: int, request_id: str) -> None:
        return None

    def block_shared(self, block: int, request_id: str) -> None:
        return None

    def block_freed(self, block: int, request_id: str) -> None:
        return None

    def attends(self, rank: int, layer: int, entries: Sequence[StepEntry]) -> None:
        return None

    def forward_writes(self, rank: int, blocks: Sequence[int]) -> None:
        return None

    def forward_reads(self, rank: int, blocks: Sequence[int]) -> None:
        return None

    def poisoned(self, rank: int, blocks: Sequence[int]) -> None:
        return None

    def asked(self, request_id: str, local_tokens: int, answer: int | None) -> None:
        return None

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None:
        return None

    def load_ended(self, request_id: str, valid_tokens: int, promised_tokens: int) -> None:
        return None

    def preempted(self, request_id: str) -> None:
        return None

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        return None

    def request_aborted(self, request_id: str) -> None:
        return None
