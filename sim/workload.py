"""Requests for the ladder, from a Mooncake-format trace or from a generator of the same shape.

A trace line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids]}`: one hash id per
512 prompt tokens, equal ids in equal places meaning equal prefixes. The ladder's requests are small, so one trace block
becomes one *chunk* of the cache; what is kept is the sharing.

1. Rows are grouped into families by their first two blocks (the conversation trace gives every request the same first
   block: a shared system prompt). A family shares prefixes beyond what all requests share, and has two members or more.
2. Families are drawn by seed among the largest ones, each giving the same number of members, until the number of
   requests is reached.
3. A hash id becomes `chunk_tokens` tokens by BLAKE3 of (seed, id): equal ids, equal tokens, on every machine. A
   prompt ends inside a chunk in proportion to the trace; a share of the prompts is forced to k chunks exactly, or one
   token less or more, where the rules for the last token bite; lengths run from half a chunk to `chunks_max` chunks.
4. Output lengths are scaled to 2..12 (the longest tenth is cut); arrivals keep their order, on average
   `arrival_gap_ns` apart.

Nothing is held: a workload is a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from blake3 import blake3

from kvcore.errors import ConfigError
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.model import TOKEN_BITS

TRACE_BLOCK_TOKENS = 512
FAMILIES_MIN = 20
OUTPUT_TOKENS_MIN = 2
OUTPUT_TOKENS_MAX = 24
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_LENGTH_MAX = 1 << 24
_HASH_ID_MAX = 1 << 62
_EDGE_SHARE = 3  # every third prompt ends at an edge of a chunk


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `timestamp_ms` since the trace began."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """`families[i]` lists the request ids that share more than what all share. `source` says where it came from."""

    requests: tuple[RequestSpec, ...]
    families: tuple[tuple[str, ...], ...]
    chunk_tokens: int
    source: str

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def shared_families(self) -> int:
        return sum(len(family) >= 2 for family in self.families)

    def describe(self) -> str:
        return (
            f"{len(self.requests)} requests in {self.shared_families} families of two or more,"
            f" {self.prompt_tokens} prompt tokens, {self.output_tokens} to generate, from {self.source}"
        )


class Draws:
    """A named, seeded sequence of integers, the same on every Python version and machine."""

    def __init__(self, seed: int, name: str) -> None:
        self._key = f"{name}/{seed}".encode()
        self._count = 0

    def below(self, bound: int) -> int:
        """Uniform in [0, bound), to within 2**-40."""
        assert 0 < bound < 1 << 24
        self._count += 1
        return _digest_int(self._key + b"/%d" % self._count) % bound

    def between(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return low + self.below(high - low + 1)


def _digest_int(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(length=8), "little")


# -- reading


def read_trace(path: str | Path) -> list[TraceRow]:
    """All rows of a trace file. Raises `ConfigError` naming the line and what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = [_parse_row(line, number, str(path)) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return rows


def _parse_row(line: str, number: int, path: str) -> TraceRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error})") from error
    except RecursionError as error:
        raise ConfigError(f"{path}, line {number}: nested too deeply") from error
    problem = _problem(row)
    if problem:
        raise ConfigError(f"{path}, line {number}: {problem}")
    return TraceRow(row["timestamp"], row["input_length"], row["output_length"], tuple(row["hash_ids"]))


def _problem(row: object) -> str:
    if not isinstance(row, Mapping):
        return "not an object"
    missing = [name for name in _FIELDS if name not in row]
    if missing:
        return f"{missing[0]} is missing"
    for name, low in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        if not _is_int(row[name], low, _LENGTH_MAX if low else _HASH_ID_MAX):
            return f"{name} is {_short(row[name])}, expected an integer of at least {low}"
    hash_ids = row["hash_ids"]
    if not isinstance(hash_ids, list) or not all(_is_int(value, 0, _HASH_ID_MAX) for value in hash_ids):
        return "hash_ids is not a list of integers of at least 0"
    expected = -(-row["input_length"] // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != expected:
        return f"{len(hash_ids)} hash_ids for {row['input_length']} tokens, expected {expected}"
    return ""


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# -- generating


def generate_trace(seed: int, n: int = 240, families: int = 40) -> list[TraceRow]:
    """`n` rows of the conversation trace's shape: one common first block, families that grow turn by turn."""
    draws = Draws(seed, "trace")
    next_id = 1
    history: list[list[int]] = []
    for _ in range(families):
        first = list(range(next_id, next_id + draws.between(1, 5)))
        next_id += len(first)
        history.append([0, *first])
    rows: list[TraceRow] = []
    for index in range(n):
        family = history[index % families if index < 2 * families else draws.below(families)]
        added = draws.between(1, 4)
        keep = draws.between(2, len(family)) if draws.below(3) == 0 else len(family)
        hash_ids = [*family[:keep], *range(next_id, next_id + added)]
        next_id += added
        if len(hash_ids) < 48:
            family[:] = hash_ids
        tail = draws.between(1, TRACE_BLOCK_TOKENS)
        input_tokens = (len(hash_ids) - 1) * TRACE_BLOCK_TOKENS + tail
        rows.append(TraceRow(index * 290, input_tokens, draws.between(1, 700), tuple(hash_ids)))
    return rows


def load_workload(path: str | Path | None, seed: int, **options: int) -> Workload:
    """From the trace at `path` if it is given and exists, else from the generator; `source` says which."""
    if path is not None and Path(path).exists():
        return workload_from_trace(read_trace(path), seed, source=f"trace {Path(path).name}", **options)
    return workload_from_trace(generate_trace(seed), seed, source=f"generated trace, seed {seed}", **options)


def workload_from_trace(
    rows: Sequence[TraceRow],
    seed: int,
    requests: int = 120,
    families: int = FAMILIES_MIN,
    chunk_tokens: int = 16,
    chunks_max: int = 40,
    *,
    arrival_gap_ns: int = 300_000,
    source: str = "trace",
) -> Workload:
    """See the module's text. Raises `ConfigError` when the trace shares too little."""
    if requests < 2 * families:
        raise ConfigError(f"{requests} requests cannot fill {families} families with two members each")
    draws = Draws(seed, "workload")
    chosen = _choose(_families(rows, chunks_max), requests, families, draws)
    members = sorted((row.timestamp_ms, index, family) for family, rows_ in enumerate(chosen) for index, row in rows_)
    by_index = {index: row for rows_ in chosen for index, row in rows_}
    output_most = sorted(row.output_tokens for row in by_index.values())[len(by_index) * 9 // 10]
    specs: list[RequestSpec] = []
    names: list[list[str]] = [[] for _ in chosen]
    time_ns = 0
    for position, (_, index, family) in enumerate(members):
        row = by_index[index]
        name = f"f{family:02d}-{len(names[family])}"
        names[family].append(name)
        prompt = _prompt(row, position, seed, chunk_tokens, chunks_max, draws)
        specs.append(RequestSpec(name, prompt, _output_tokens(row, output_most), time_ns))
        time_ns += draws.between(0, 2 * (arrival_gap_ns // 1000)) * 1000
    workload = Workload(tuple(specs), tuple(map(tuple, names)), chunk_tokens, source)
    assert len(workload.requests) == requests
    assert workload.shared_families >= families
    return workload


_Member = tuple[int, TraceRow]


def _families(rows: Iterable[TraceRow], chunks_max: int) -> list[list[_Member]]:
    """Short rows by their first two blocks; families with two members or more, larger ones first.

    Long prompts come from lengthening some (`_prompt_tokens`): a run of seconds cannot afford the trace's whole tail.
    """
    found: dict[tuple[int, ...], list[_Member]] = {}
    for index, row in enumerate(rows):
        if 2 <= len(row.hash_ids) <= chunks_max * 3 // 10:
            found.setdefault(row.hash_ids[:2], []).append((index, row))
    shared = [members for members in found.values() if _shares(members, chunks_max)]
    return sorted(shared, key=lambda members: (-len(members), members[0][0]))


def _shares(members: Sequence[_Member], chunks_max: int) -> bool:
    """At least two members, and some two neighbours in time share blocks that are whole in both."""
    whole = [set(row.hash_ids[: min(chunks_max, len(row.hash_ids) - 1)]) for _, row in members]
    return any(len(one & other) >= 2 for one, other in pairwise(whole))


def _choose(found: list[list[_Member]], requests: int, families: int, draws: Draws) -> list[list[_Member]]:
    if len(found) < families:
        raise ConfigError(f"the trace has {len(found)} families that share a prefix, {families} are needed")
    pool = found[: max(families, min(len(found), 4 * families))]
    for position in range(families):  # the first `families` of a seeded shuffle
        other = draws.between(position, len(pool) - 1)
        pool[position], pool[other] = pool[other], pool[position]
    chosen: list[list[_Member]] = [[] for _ in range(families)]
    taken = 0
    extra = families
    while taken < requests:
        before = taken
        for family, members in enumerate(pool[: len(chosen)]):
            if taken < requests and len(chosen[family]) < len(members):
                chosen[family].append(members[len(chosen[family])])
                taken += 1
        if taken == before:
            if extra == len(pool):
                raise ConfigError(f"the trace's families have {taken} requests, {requests} are needed")
            chosen.append([])
            extra += 1
    return chosen


def _prompt(
    row: TraceRow, position: int, seed: int, chunk_tokens: int, chunks_max: int, draws: Draws
) -> tuple[int, ...]:
    blocks = min(len(row.hash_ids), chunks_max)
    length = _prompt_tokens(row, position, blocks, chunk_tokens, chunks_max, draws)
    needed = -(-length // chunk_tokens)
    ids = list(row.hash_ids[:needed])
    tokens = [token for hash_id in ids for token in _chunk(seed, hash_id, chunk_tokens)]
    private = _HASH_ID_MAX + (position << 16)
    while len(tokens) < length:  # longer than the row's blocks: what is added belongs to nobody else
        tokens.extend(_chunk(seed, private + len(tokens), chunk_tokens))
    return tuple(tokens[:length])


def _prompt_tokens(row: TraceRow, position: int, blocks: int, chunk_tokens: int, chunks_max: int, draws: Draws) -> int:
    longest = chunks_max * chunk_tokens
    if position % 40 == 7:
        return max(1, chunk_tokens // 2)  # shorter than a chunk: nothing of it can be cached
    if position % 40 == 23:
        return longest
    if position % 40 == 31:
        return draws.between(longest // 2, longest)
    if draws.below(_EDGE_SHARE) == 0:
        edge = max(1, blocks - draws.below(2)) * chunk_tokens
        return max(1, min(longest, edge + draws.between(-1, 1)))
    tail = (row.input_tokens - 1) % TRACE_BLOCK_TOKENS + 1 if blocks == len(row.hash_ids) else TRACE_BLOCK_TOKENS
    return (blocks - 1) * chunk_tokens + max(1, tail * chunk_tokens // TRACE_BLOCK_TOKENS)


def _chunk(seed: int, hash_id: int, chunk_tokens: int) -> list[int]:
    raw = blake3(f"tokens/{seed}/{hash_id}".encode()).digest(length=4 * chunk_tokens)
    words = np.frombuffer(raw, dtype="<u4") & np.uint32((1 << TOKEN_BITS) - 1)
    return [int(word) for word in words]


def _output_tokens(row: TraceRow, output_most: int) -> int:
    """Scaled so that `output_most` of the trace becomes the most; the few longer ones are cut to it."""
    span = OUTPUT_TOKENS_MAX - OUTPUT_TOKENS_MIN
    return OUTPUT_TOKENS_MIN + min(row.output_tokens, output_most) * span // max(1, output_most)
