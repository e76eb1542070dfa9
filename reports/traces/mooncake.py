"""Mooncake's FAST 2025 format: one JSON object per line with timestamp (ms), input_length, output_length, hash_ids.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces. An id covers 512 tokens there, but other traces in this
format use other sizes, so the size is found: the one that all lines agree with. A file without any is refused with the
first line that contradicts the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from kvcore.reports.traces.trace import Request, Trace, check_tokens

BLOCK_SIZES = (512, 256, 128, 64, 32, 16, 1024, 2048, 4096)
MS = 1e-3


class Row(msgspec.Struct):
    """A line of the file. Other fields are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(lines: Iterator[bytes], path: Path, limit: int | None) -> Trace:
    """The trace as it stands in the file."""
    rows = list(islice(_rows(lines, path), limit))
    block_tokens = _block_tokens(rows, path)
    requests = [Request(row.timestamp * MS, row.input_length, row.output_length, row.hash_ids) for row in rows]
    return Trace(path.name, block_tokens, tuple(requests))


def _rows(lines: Iterator[bytes], path: Path) -> Iterator[Row]:
    decode = msgspec.json.Decoder(Row).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ConfigError(f"{path}, line {number} is empty: the trace has a hole")
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number} is no request in Mooncake's format: {error}") from None
        check_tokens(row.input_length, row.output_length, f"{path}, line {number}")
        yield row


def _block_tokens(rows: Sequence[Row], path: Path) -> int:
    """The block size that every row agrees with."""
    fits = [size for size in BLOCK_SIZES if all(_agrees(row, size) for row in rows)]
    if fits or not rows:
        return (fits or BLOCK_SIZES)[0]
    size = max(BLOCK_SIZES, key=lambda one: sum(_agrees(row, one) for row in rows))
    number, row = next((number, row) for number, row in enumerate(rows, 1) if not _agrees(row, size))
    raise ConfigError(
        f"{path}: most requests have blocks of {size} tokens, but line {number} has {len(row.hash_ids)} hash_ids for "
        f"{row.input_length:,} input tokens: a hole, or two block sizes in one trace"
    )


def _agrees(row: Row, size: int) -> bool:
    return len(row.hash_ids) == -(-row.input_length // size)
