"""Object groups and the prefix rule: which lengths a set of cells can serve, and which cells a length needs.

Theory of operation
-------------------
A hybrid model keeps KV under several attention rules. Layers with one rule are an *object group*; each (group, rank) is
a *row*; row r and chunk i make the *cell* (r, i), one object. Presence is one integer per row (`kvcore.bitmap`).

1. A row serves a prefix of L chunks iff it holds the cells that computing goes on from:
       full        chunks [0, L)
       window      chunks [max(0, L-w), L),  w = ceil((window_tokens - 1) / chunk_tokens);  window 1 needs nothing
       recurrent   chunk L-1, whose object is the state at boundary L
   L = 0 needs nothing.
2. The hit is a length that *every* row serves. `fold` gives all of them as a set of lengths, not the best alone:
   servers that hold parts of the cells are combined by intersection, and a minimum of bests would be wrong for window
   and recurrent rows ([1,0,1] under w = 1 serves 0, 1 and 3, but not 2).
3. The last token. Logits need one token computed, so where L chunks are the whole prompt of n tokens (the *full hit*)
   only P = n-1 are used. A window row must then hold the chunks of tokens [n - window, n-1): one more on the left when
   window = 1 mod chunk. A recurrent state already contains token n, so with a recurrent row the full hit is no hit.
4. Rows of one rule fail together: `fold` first ANDs the rows of each rule, then asks the rule once. That is
   O(rows + distinct windows * log w) operations on whole rows and nothing per cell. What depends on the layout only
   (rules, their rows, sizes) is worked out when the layout is made.
5. `skip_chunks`: chunks that lie wholly in the engine's own prefix count as present and are never needed.
6. `unfold` is the converse: the cells that serving L uses. For every L: bit L of fold(rows) is set iff each row covers
   unfold(L); the tests check both against a cell-by-cell oracle.

Rejected: counting ones; stopping at the first hole (wrong for windows); one Python loop step per cell (64 rows x 4,096
chunks take tens of milliseconds); answering a single best length (see 2); a window of w+1 always (a writer that keeps
exactly w would never be hit).

Nothing here is held or freed: layouts are frozen values, presence comes in and sets go out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import reduce
from operator import and_
from typing import NamedTuple

from kvcore.bitmap import bits, ones, span, trailing_ones, windowed
from kvcore.errors import CallerError, ConfigError
from kvcore.keys import digest_fields

CHUNK_TOKENS_MAX = 65536
_MISSING_SHOWN_MAX = 8


@unique
class GroupKind(Enum):
    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """Layers with one attention rule, as the engine pages them.

    `block_tokens`: tokens per engine block; recurrent: spacing of the boundaries at which a state can be kept.
    `bytes_per_block`: of all layers of the group on one rank; recurrent: of one state.
    `window_tokens`: how many tokens a token attends to, itself included; only for WINDOW.
    """

    kind: GroupKind
    block_tokens: int
    bytes_per_block: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GroupKind):
            raise ConfigError(f"kind must be a GroupKind, not {self.kind!r}")
        _require_positive("block_tokens", self.block_tokens)
        _require_positive("bytes_per_block", self.bytes_per_block)
        if self.kind is GroupKind.WINDOW:
            _require_positive("window_tokens of a window group", self.window_tokens)
        elif self.window_tokens is not None:
            raise ConfigError(f"window_tokens is for window groups only, this group is {self.kind.value}")

    def __str__(self) -> str:
        window = f" {self.window_tokens}" if self.window_tokens is not None else ""
        return f"{self.kind.value}{window}"


def _require_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


@dataclass(frozen=True, slots=True)
class Row:
    """One (group, rank). `group` is the position in `CacheLayout.groups`."""

    index: int
    group: int
    rank: int


class _Rule(NamedTuple):
    """An attention rule in chunks, and the rows that follow it.

    `width`: cells needed before boundary L. On a full hit of L chunks: cells [L - full_hit_lead, L - full_hit_tail).
    """

    kind: GroupKind
    width: int
    full_hit_lead: int
    full_hit_tail: int

    def needed(self, length: int, full_hit: bool) -> int:
        """The cells of one row that serving `length` chunks uses."""
        if length == 0:
            return 0
        if self.kind is GroupKind.FULL:
            return ones(length)
        if full_hit:
            assert self.kind is GroupKind.WINDOW
            return span(max(0, length - self.full_hit_lead), length - self.full_hit_tail)
        return span(max(0, length - self.width), length)

    def servable(self, present: int, chunks: int) -> int:
        """Lengths 0 .. chunks that `present` serves, the last-token rule left aside."""
        if self.kind is GroupKind.FULL:
            return ones(min(trailing_ones(present), chunks) + 1)
        return windowed(present, self.width, chunks)

    def serves_full_hit(self, present: int, chunks: int) -> bool:
        """Whether `present` serves a prompt of exactly `chunks` chunks but for its last token."""
        if self.kind is GroupKind.RECURRENT:
            return False
        needed = self.needed(chunks, full_hit=True)
        return present & needed == needed


def _rule_of(group: ObjectGroup, chunk_tokens: int) -> _Rule:
    if group.kind is GroupKind.FULL:
        return _Rule(GroupKind.FULL, 0, 0, 0)
    if group.kind is GroupKind.RECURRENT:
        return _Rule(GroupKind.RECURRENT, 1, 0, 0)
    window = group.window_tokens
    assert window is not None
    if window == 1:
        return _Rule(GroupKind.WINDOW, 0, 0, 0)  # a token that attends to itself alone needs no past, full hit or not
    # With n = L * chunk, tokens [n - window, n - 1) begin in chunk L - ceil(window / chunk). They end in chunk L - 1,
    # except where a chunk is one token: there the last chunk is the token that is computed again.
    tail = 1 if chunk_tokens == 1 else 0
    return _Rule(GroupKind.WINDOW, _ceil_div(window - 1, chunk_tokens), _ceil_div(window, chunk_tokens), tail)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


class _RuleRows(NamedTuple):
    rule: _Rule
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The shape of a cache: groups, ranks, chunk size. Rows are ordered by rank, then by group.

    Row index = rank * len(groups) + group.
    """

    groups: tuple[ObjectGroup, ...]
    ranks: int
    chunk_tokens: int
    rows: tuple[Row, ...] = field(init=False, repr=False, compare=False)
    cell_bytes_rows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    fingerprint: str = field(init=False, repr=False, compare=False)
    _rules: tuple[_RuleRows, ...] = field(init=False, repr=False, compare=False)
    _rule_of_row: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _recurrent: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        _check_chunk_tokens(self.groups, self.chunk_tokens)
        _require_positive("ranks", self.ranks)
        group_indexes = range(len(self.groups))
        rows = [(rank, group) for rank in range(self.ranks) for group in group_indexes]
        self._cache("rows", tuple(Row(index, group, rank) for index, (rank, group) in enumerate(rows)))
        self._cache("cell_bytes_rows", tuple(self.cell_bytes(group) for _, group in rows))
        self._cache("fingerprint", self._digest().hex()[:32])
        self._cache_rules()
        assert len(self.rows) == self.ranks * len(self.groups)
        assert len(self._rule_of_row) == len(self.rows)

    def _cache(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _cache_rules(self) -> None:
        members: dict[_Rule, list[int]] = {}
        by_group = [_rule_of(group, self.chunk_tokens) for group in self.groups]
        for row in self.rows:
            members.setdefault(by_group[row.group], []).append(row.index)
        order = {rule: position for position, rule in enumerate(members)}
        self._cache("_rules", tuple(_RuleRows(rule, tuple(indexes)) for rule, indexes in members.items()))
        self._cache("_rule_of_row", tuple(order[by_group[row.group]] for row in self.rows))
        self._cache("_recurrent", any(group.kind is GroupKind.RECURRENT for group in self.groups))

    def _digest(self) -> bytes:
        fields: dict[str, str | int] = {"ranks": self.ranks, "chunk_tokens": self.chunk_tokens}
        for index, group in enumerate(self.groups):
            fields[f"{index}.kind"] = group.kind.value
            fields[f"{index}.block_tokens"] = group.block_tokens
            fields[f"{index}.bytes_per_block"] = group.bytes_per_block
            fields[f"{index}.window_tokens"] = group.window_tokens or 0
        return digest_fields("layout", fields)

    def blocks_per_chunk(self, group: int) -> int:
        """Engine blocks behind one cell; a recurrent cell is the one state at its chunk's end."""
        described = self.groups[group]
        if described.kind is GroupKind.RECURRENT:
            return 1
        return self.chunk_tokens // described.block_tokens

    def cell_bytes(self, group: int) -> int:
        return self.blocks_per_chunk(group) * self.groups[group].bytes_per_block

    def virtual(self, skip_chunks: int) -> int:
        """The chunks that count as present and are not needed, because the engine has them already."""
        return ones(skip_chunks)

    def fold(self, rows: Sequence[int], chunks: int, prompt_tokens: int, skip_chunks: int = 0) -> int:
        """The set of lengths 0 .. chunks that every row can serve; 0 always belongs to it.

        `rows[r]` bit i: cell (r, i) is there; bits from `chunks` on are ignored. `chunks` <= full chunks of the prompt.
        """
        assert len(rows) == len(self.rows)
        assert chunks >= 0
        assert chunks * self.chunk_tokens <= prompt_tokens
        inside = ones(chunks)
        virtual = ones(min(skip_chunks, chunks))
        full_hit = self._is_full_hit(chunks, prompt_tokens)
        lengths = ones(chunks + 1)
        for rule, indexes in self._rules:
            present = (reduce(and_, map(rows.__getitem__, indexes)) | virtual) & inside
            served = rule.servable(present, chunks)
            if full_hit:
                served &= ~(1 << chunks)
                served |= rule.serves_full_hit(present, chunks) << chunks
            lengths &= served
        assert lengths & 1
        return lengths

    def best(self, lengths: int) -> int:
        """The greatest length of a set that `fold` gave."""
        assert lengths & 1
        return lengths.bit_length() - 1

    def unfold(self, length: int, prompt_tokens: int, skip_chunks: int = 0) -> list[int]:
        """Per row the cells that serving `length` chunks uses, without those the engine has already.

        CallerError for a length that no set of cells can serve: no prefix of the prompt, or the whole prompt although
        there is a recurrent row.
        """
        self._require_prefix(length, prompt_tokens)
        full_hit = self._is_full_hit(length, prompt_tokens)
        if full_hit and self._recurrent:
            raise CallerError(
                f"{length} chunks are the whole prompt, and a recurrent state already contains its last token"
            )
        beyond = ~ones(min(skip_chunks, length))
        masks = [rule.needed(length, full_hit) & beyond for rule, _ in self._rules]
        return [masks[position] for position in self._rule_of_row]

    def usable_tokens(self, length: int, prompt_tokens: int) -> int:
        """P: tokens that need not be computed when `length` chunks are served; n-1 on a full hit.

        Whether they can be served is for `fold` to say (a full hit with a recurrent row cannot).
        """
        self._require_prefix(length, prompt_tokens)
        return prompt_tokens - 1 if self._is_full_hit(length, prompt_tokens) else length * self.chunk_tokens

    def explain(self, rows: Sequence[int], chunks: int, prompt_tokens: int, length: int, skip_chunks: int = 0) -> str:
        """For people: why `length` is not servable from `rows`, or that it is."""
        head = f"length {length} of {chunks} chunks ({self.chunk_tokens} tokens each, prompt {prompt_tokens})"
        if not 0 <= length <= chunks:
            return f"{head}: not a length of this lookup"
        reasons = list(self._reasons(rows, prompt_tokens, length, skip_chunks))
        return f"{head}: not servable\n  " + "\n  ".join(reasons) if reasons else f"{head}: servable"

    def _reasons(self, rows: Sequence[int], prompt_tokens: int, length: int, skip_chunks: int) -> Iterator[str]:
        full_hit = self._is_full_hit(length, prompt_tokens)
        for row in self.rows:
            group = self.groups[row.group]
            name = f"row {row.index} (rank {row.rank}, group {row.group}: {group})"
            if full_hit and group.kind is GroupKind.RECURRENT:
                yield f"{name} cannot serve the whole prompt: its state already contains the last token"
                continue
            needed = self._rules[self._rule_of_row[row.index]].rule.needed(length, full_hit) & ~ones(skip_chunks)
            missing = list(bits(needed & ~rows[row.index]))
            if missing:
                yield f"{name} needs chunks {_listed(list(bits(needed)))} and lacks {_listed(missing)}"

    def _is_full_hit(self, length: int, prompt_tokens: int) -> bool:
        return length > 0 and length * self.chunk_tokens == prompt_tokens

    def _require_prefix(self, length: int, prompt_tokens: int) -> None:
        if not 0 <= length * self.chunk_tokens <= prompt_tokens:
            raise CallerError(f"{length} chunks of {self.chunk_tokens} tokens are no prefix of {prompt_tokens} tokens")


def _listed(members: list[int]) -> str:
    """'0-3, 5': ascending numbers as ranges, cut when there are many."""
    ranges: list[list[int]] = []
    for member in members:
        if ranges and ranges[-1][1] == member - 1:
            ranges[-1][1] = member
        else:
            ranges.append([member, member])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MISSING_SHOWN_MAX]]
    hidden = sum(last - first + 1 for first, last in ranges[_MISSING_SHOWN_MAX:])
    return ", ".join(shown) + (f" and {hidden} more" if hidden else "")


def negotiate_chunk_tokens(groups: Sequence[ObjectGroup], wish: int) -> int:
    """The legal chunk size nearest to `wish` (of two equally near ones the smaller); ConfigError says why none is.

    Legal: a multiple of every group's `block_tokens`, at most CHUNK_TOKENS_MAX.
    """
    _require_positive("the wished chunk size", wish)
    unit = _chunk_unit(groups)
    below = min(max(wish // unit, 1), CHUNK_TOKENS_MAX // unit) * unit
    above = min(below + unit, CHUNK_TOKENS_MAX // unit * unit)
    return below if wish - below <= above - wish else above


def _chunk_unit(groups: Sequence[ObjectGroup]) -> int:
    """The smallest legal chunk size; every legal one is a multiple of it."""
    if not groups:
        raise ConfigError("a cache needs at least one object group")
    unit = math.lcm(*(group.block_tokens for group in groups))
    if unit > CHUNK_TOKENS_MAX:
        blocks = ", ".join(f"{group}: {group.block_tokens}" for group in groups)
        raise ConfigError(
            f"no chunk size is legal: the least common multiple of the block sizes ({blocks}) is {unit} tokens, "
            f"the limit is {CHUNK_TOKENS_MAX}"
        )
    return unit


def _check_chunk_tokens(groups: Sequence[ObjectGroup], chunk_tokens: int) -> None:
    _require_positive("chunk_tokens", chunk_tokens)
    if chunk_tokens > CHUNK_TOKENS_MAX:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}, the limit is {CHUNK_TOKENS_MAX}")
    nearest = negotiate_chunk_tokens(groups, chunk_tokens)
    for index, group in enumerate(groups):
        if chunk_tokens % group.block_tokens:
            raise ConfigError(
                f"chunk_tokens {chunk_tokens} is no multiple of the {group.block_tokens} tokens per block of "
                f"group {index} ({group}); the nearest legal size is {nearest}"
            )
    assert chunk_tokens == nearest
