"""The agentic coding trace of Weka in its delta coding: one JSON object per session, gzip or plain.

Source: github.com/callanjfox/kv-cache-tester, traces/ (Apache-2.0). A session has `block_size` (64 tokens), local block
ids and `requests`; a request keeps the first `keep` blocks of the one before it in its list and adds runs
`[first id, length]`. Most prompts name their whole blocks only, a few the partial one at the end too; both are taken.
A subagent is an entry with a list of its own, whose times count from its start. Its ids are of the same local space as
its session's, so it may share its beginning.

Blocks of 64 tokens are joined to chunks of 512 (`chunk_tokens`): the cache's unit, and an eighth of the work. Times are
relative to the session, so the sessions' own beginnings have to be made up: one after the other at exponential gaps of
`session_gap_s` on average. Requests of one session keep their distance whatever the served system does (an open loop).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvcore.errors import ConfigError
from kvcore.reports.traces.trace import (
    BITS,
    BLOCK_IDS,
    BLOCK_TOKENS_MAX,
    TOKENS_MAX,
    Chunker,
    Request,
    Trace,
    check_tokens,
    told,
)
from kvcore.sim.streams import RandomStream

CHUNK_TOKENS = 512
SESSION_GAP_S = 30.0
BLOCKS_MAX = TOKENS_MAX // 16


class Row(msgspec.Struct):
    """A request, or a subagent (`type` "subagent") with requests of its own. Other fields are ignored."""

    t: float
    type: str
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    keep: int = 0
    add: list[tuple[int, int]] = []
    requests: list[Row] = []


class Session(msgspec.Struct):
    """A line of the file."""

    block_size: int
    requests: list[Row]


class _Told(NamedTuple):
    """A request of a session: seconds since the session began, tokens, chunk ids local to the session."""

    t_s: float
    input_tokens: int
    output_tokens: int
    chunks: tuple[int, ...]


def read(
    lines: Iterator[bytes], path: Path, limit: int | None, seed: int = 0, session_gap_s: float = SESSION_GAP_S
) -> Trace:
    """Sessions that begin one after the other, merged by time; at most `limit` requests."""
    draw = RandomStream(seed, "trace.weka").getrandbits
    merged: list[Request] = []
    waiting: list[tuple[float, int, Request]] = []
    begin_s, first_id, serial = 0.0, 0, 0
    for number, line in enumerate(lines, 1):
        while waiting and waiting[0][0] <= begin_s and len(merged) != limit:
            merged.append(heappop(waiting)[2])
        if len(merged) == limit:
            break
        ids = 0
        for row in _requests(line, f"{path}, line {number}"):
            ids = max(ids, max(row.chunks, default=-1) + 1)
            blocks = tuple([first_id + one for one in row.chunks])
            serial += 1
            at = begin_s + row.t_s
            heappush(waiting, (at, serial, Request(at, row.input_tokens, row.output_tokens, blocks)))
        first_id += ids
        begin_s += -session_gap_s * math.log(1 - draw(BITS) / (1 << BITS))
    while waiting and len(merged) != limit:
        merged.append(heappop(waiting)[2])
    note = (
        f"blocks joined to {CHUNK_TOKENS} tokens; sessions begin {session_gap_s:g} s after each other on average "
        f"(exponential gaps, seed {seed}); times within a session as recorded"
    )
    return Trace(path.name, CHUNK_TOKENS, tuple(merged), (note,))


def _requests(line: bytes, where: str) -> Iterator[_Told]:
    try:
        session = msgspec.json.decode(line, type=Session)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no session in Weka's format: {error}") from None
    size = session.block_size
    if not 1 <= size <= min(CHUNK_TOKENS, BLOCK_TOKENS_MAX) or CHUNK_TOKENS % size:
        raise ConfigError(f"{where}: blocks of {size} tokens do not make chunks of {CHUNK_TOKENS}: mixed block sizes?")
    chunker = Chunker(CHUNK_TOKENS // size)
    yield from _list(session.requests, 0.0, chunker, size, where)


def _list(rows: list[Row], begin_s: float, chunker: Chunker, size: int, where: str) -> Iterator[_Told]:
    """One list of requests, each coded against the one before it."""
    blocks: list[int] = []
    chunks: tuple[int, ...] = ()
    for at, row in enumerate(rows):
        place = f"{where}, request {at + 1}"
        if not math.isfinite(row.t) or row.t < 0:
            raise ConfigError(f"{place} is at {row.t:g} s of its session")
        if row.type == "subagent":
            yield from _list(row.requests, begin_s + row.t, chunker, size, place)
            continue
        check_tokens(row.input_tokens, row.output_tokens, place)
        same = min(row.keep, len(blocks)) // (CHUNK_TOKENS // size)
        blocks = _decoded(blocks, row, size, place)
        chunks = chunker.chunks(blocks, chunks[:same])
        whole = chunks if len(chunks) * CHUNK_TOKENS >= row.input_tokens else (*chunks, chunker.fresh())
        yield _Told(begin_s + row.t, row.input_tokens, row.output_tokens, whole)


def _decoded(before: list[int], row: Row, size: int, place: str) -> list[int]:
    if not 0 <= row.keep <= len(before):
        raise ConfigError(
            f"{place} keeps {told(str(row.keep))} blocks of a request that has {len(before)}: the trace has a hole"
        )
    if any(not 0 <= first < BLOCK_IDS or not 0 <= length <= BLOCKS_MAX for first, length in row.add):
        raise ConfigError(f"{place} adds a run that cannot be")
    held = row.keep + sum(length for _, length in row.add)
    if not -size < row.input_tokens - held * size < size:
        raise ConfigError(
            f"{place} has {row.input_tokens:,} input tokens and {held:,} blocks of {size}: the trace has a hole"
        )
    blocks = before[: row.keep]
    for first, length in row.add:
        blocks.extend(range(first, first + length))
    return blocks
