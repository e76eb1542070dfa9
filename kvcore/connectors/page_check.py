"""A byte round trip through the copy engine when an engine's pages are registered.

Up to three blocks of every group get a pattern through the device; the pages must then hold it, the blocks beside them
must be untouched, and what the device reads back must be the pattern. The engine's bytes are put back, whatever
happens. Discovered tensors take the steps of `kvcore.device.selftest`, which knows where each byte has to lie.

Groups may lie over each other, so they are checked one after the other. At registration nobody computes; the check
begins behind everything that the engine has submitted so far (it may still be clearing its pages).

Who holds: the engine its pages. The call returns when no copy touches them any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.device.discover import PagedKV
from kvcore.device.paged import PagedCopy
from kvcore.device.planes import sample_blocks
from kvcore.device.selftest import Step, steps
from kvcore.errors import InternalError
from kvcore.ports import Copy, CopyEngine

Bytes = npt.NDArray[np.uint8]

_STREAM = "selftest"
_POISON = 0xA5


async def check_pages(pages: Sequence[Any], device: CopyEngine) -> None:
    """`pages[g]`: [blocks, ...], numpy arrays on the engine's memory. Raises InternalError."""
    await _copy(device, (), "before it")
    for group, blocks in enumerate(pages):
        written = sample_blocks(len(blocks))
        beside = sorted({block + step for block in written for step in (-1, 1)} - {-1, len(blocks), *written})
        with _kept(blocks, [*written, *beside]) as before:
            await _round_trip(blocks, written, group, device)
            for block in beside:
                _compare(before[block], _bytes(blocks[block]), f"group {group}: block {block}, which nobody wrote,")


async def check_tensors(groups: Sequence[PagedKV], device: CopyEngine) -> None:
    """The same for discovered tensors, through paged copies. Raises InternalError."""
    await _copy(device, (), "before it")
    for group, kv in enumerate(groups):
        with closing(steps(kv)) as moves:
            for step in moves:
                await _carry_out(step, kv, device, f"group {group}")


async def _carry_out(step: Step, kv: PagedKV, device: CopyEngine, what: str) -> None:
    """A copy's chunks lie on the host, the steps' where the pages are."""
    hosts = [_on_host(chunk) for chunk in step.chunks]
    chunks = [host.numpy() for host in hosts]
    copy: Any = PagedCopy(step.direction, kv, step.rows, chunks, step.skip_tokens, what)
    await _copy(device, [copy], what)
    for chunk, host in zip(step.chunks, hosts, strict=True):
        if chunk is not host:
            chunk.copy_(host)


def _on_host(chunk: Any) -> Any:
    """The chunk itself where the pages are on the host. Else pinned, or what is tried is not what will serve."""
    return chunk.cpu().pin_memory() if chunk.is_cuda else chunk.cpu()


async def _round_trip(blocks: Any, written: Sequence[int], group: int, device: CopyEngine) -> None:
    patterns = {block: _pattern(blocks[block].nbytes, block) for block in written}
    await _copy(device, [Copy(pattern.data, blocks[block]) for block, pattern in patterns.items()], f"group {group}")
    for block, pattern in patterns.items():
        _compare(pattern, _bytes(blocks[block]), f"group {group}: block {block}, which was written,")
    read = {block: np.full_like(pattern, _POISON) for block, pattern in patterns.items()}
    await _copy(device, [Copy(blocks[block], buffer.data) for block, buffer in read.items()], f"group {group}")
    for block, pattern in patterns.items():
        _compare(pattern, read[block], f"group {group}: what was read from block {block}")


async def _copy(device: CopyEngine, copies: Sequence[Copy], what: str) -> None:
    ticket = device.submit(copies, stream=_STREAM, after=(device.compute_event(),))
    await ticket.wait()
    if ticket.error is not None:
        raise InternalError(f"self test: {what}: a copy failed: {ticket.error!r}") from ticket.error


@contextmanager
def _kept(blocks: Any, numbers: Sequence[int]) -> Iterator[dict[int, Bytes]]:
    """The bytes of some blocks now; put back at the end."""
    saved = {block: blocks[block].copy() for block in numbers}
    try:
        yield {block: _bytes(value) for block, value in saved.items()}
    finally:
        for block, value in saved.items():
            blocks[block] = value


def _bytes(block: Any) -> Bytes:
    return np.frombuffer(np.ascontiguousarray(block).tobytes(), np.uint8)


def _pattern(size: int, salt: int) -> Bytes:
    """Bytes in which neighbours differ; another sequence for every block."""
    count = np.arange(size, dtype=np.uint64)
    return np.asarray(((count * np.uint64(2654435761) >> np.uint64(11)) + np.uint64(salt * 41)) % 251).astype(np.uint8)


def _compare(expected: Bytes, found: Bytes, what: str) -> None:
    different = np.flatnonzero(expected != found)
    if len(different):
        raise InternalError(
            f"self test: {what} differs from byte {different[0]} on. The pages are not laid out as discovered, or the "
            "copy engine is broken; the KV of this engine must not be cached"
        )
