"""The limits of a server, checked request by request. Pure.

Nothing is held or freed here: a request that is over a limit is refused before anything is done for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import CallerError
from kvcore.service.protocol import ErrorCode, Lookup, ServerLimits, unpack_bits


class RefusedError(Exception):
    """A request that is answered with an error; arguments: code, text."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def too_large(what: str, value: int, limit: int) -> RefusedError:
    return RefusedError(ErrorCode.TOO_LARGE, f"{value} {what}; the limit is {limit}")


class LimitChecks:
    """Each check returns, or raises `RefusedError` with TOO_LARGE."""

    __slots__ = ("_limits",)

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits

    def name(self, name: str) -> None:
        if len(name) > self._limits.name_chars_max:
            raise too_large("characters of a name", len(name), self._limits.name_chars_max)

    def salt(self, salt: str) -> None:
        if len(salt) > self._limits.salt_chars_max:
            raise too_large("characters of a salt", len(salt), self._limits.salt_chars_max)

    def batch(self, cells: Sequence[object]) -> None:
        if len(cells) > self._limits.batch_cells_max:
            raise too_large("cells of a batch", len(cells), self._limits.batch_cells_max)

    def bits(self, done: bytes) -> int:
        """The bit set, whose length is bounded by that of a batch."""
        if len(done) * 8 > self._limits.batch_cells_max + 7:
            raise too_large("bits of a batch", len(done) * 8, self._limits.batch_cells_max)
        return unpack_bits(done)

    def hashes(self, hashes: Sequence[bytes]) -> None:
        longest = max(map(len, hashes), default=0)
        if longest > self._limits.hash_bytes_max:
            raise too_large("bytes of a hash", longest, self._limits.hash_bytes_max)

    def lookup(self, request: Lookup, chunk_tokens: int) -> None:
        """Also raises `CallerError` for one that makes no sense."""
        self.name(request.session)
        self.salt(request.salt)
        chunks = request.base + len(request.hashes)
        if chunks > self._limits.chunks_per_session_max:
            raise too_large("chunks of a session", chunks, self._limits.chunks_per_session_max)
        if request.timeout_ms > self._limits.lookup_timeout_ms_max:
            raise too_large("timeout_ms", request.timeout_ms, self._limits.lookup_timeout_ms_max)
        if chunks * chunk_tokens > request.prompt_tokens:
            raise CallerError(f"{chunks} chunks are more than a prompt of {request.prompt_tokens} tokens has")
        if chunks == 0:
            raise CallerError("a lookup names at least one chunk")
        self.hashes(request.hashes)
