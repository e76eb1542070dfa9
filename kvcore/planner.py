"""The plan of one lookup: which cell comes from where. Pure; nothing here knows time, memory or stores.

Theory of operation
-------------------
Presence is one integer per row (bit i = chunk i). A `Demand` says what a lookup is about: the layout, the number of
chunks, and `required`, the cells this server has to answer for. Cells outside `required` (another server's, or tokens
that the engine already holds) count as present and cost nothing. Given

    present   cells leased in L1
    loading   cells that some load in flight will publish, and that we have joined
    found     per adapter, in configured order: cells found and locked there
    budget    bytes that may be loaded

`plan` works in one pass:

1. Fold everything that exists anywhere: the set of lengths that could be served at all.
2. Take the greatest of them whose load bytes fit the budget. Bytes of full-attention rows only grow with the length,
   so a bisection over those rows gives a ceiling; from there downwards each candidate's exact cost is computed,
   because window and recurrent rows need *other* cells for another length, sometimes cheaper, sometimes dearer.
3. Give each needed cell exactly one source: L1, else a load in flight, else the first adapter that found it.
4. Whatever was locked and not assigned is returned as `unlocks`; L1 cells that the length does not use as `spare`.

Length 0 needs nothing and fits every budget, so there is always a plan. A plan never names a cell twice: that is
asserted here (where it is made) and again where loads begin.

Rejected: choosing per cell the cheapest or fastest adapter (a second request would choose otherwise, and "first in
the configured order" is what an operator can predict); cutting a demand by chunks instead of bytes (groups differ by
orders of magnitude); a greedy walk that loads while it plans (a hole found late has then wasted everything behind
it).

Who holds, announces, frees: nothing. Plans are values; leases and locks named in one are held by the lookup job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.groups import CacheLayout, GroupKind

Rows = tuple[int, ...]
"""One bit set per row of the layout; bit i stands for chunk i."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one lookup asks of this server. `required`: per row, the cells that are ours to supply."""

    layout: CacheLayout
    chunks: int
    prompt_tokens: int
    required: Rows

    def __post_init__(self) -> None:
        assert self.chunks >= 0
        assert len(self.required) == len(self.layout.rows)
        assert max(self.required, default=0) >> self.chunks == 0

    def fold(self, rows: Sequence[int]) -> int:
        """Bit set of the lengths that `rows` (a subset of `required`) can serve."""
        full = (1 << self.chunks) - 1
        seen = [row | (full & ~required) for row, required in zip(rows, self.required, strict=True)]
        return self.layout.fold(seen, self.chunks, self.prompt_tokens)

    def needed(self, length: int) -> Rows:
        """The cells of ours that serving `length` uses."""
        wanted = self.layout.unfold(length, self.prompt_tokens)
        return tuple(row & required for row, required in zip(wanted, self.required, strict=True))

    def bytes_of(self, rows: Sequence[int]) -> int:
        return sum(row.bit_count() * size for row, size in zip(rows, self.layout.cell_bytes_rows, strict=True) if row)


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of `plan`. All fields are cells per row; `loads` and `unlocks` per adapter."""

    length: int
    kept: Rows  # needed and leased in L1
    spare: Rows  # leased in L1, not needed for this length
    joined: Rows  # needed and already loading
    loads: tuple[Rows, ...]  # needed and to be loaded
    unlocks: tuple[Rows, ...]  # locked and not to be loaded
    load_bytes: int


def demand_of(
    layout: CacheLayout, chunks: int, prompt_tokens: int, masks: Sequence[int], skip_chunks: int = 0
) -> Demand:
    """`masks`: per row, the cells this server is responsible for; the first `skip_chunks` chunks are not needed."""
    asked = ((1 << chunks) - 1) & ~((1 << min(skip_chunks, chunks)) - 1)
    return Demand(layout, chunks, prompt_tokens, tuple([mask & asked for mask in masks]))


def none_of(rows: Sequence[int]) -> Rows:
    return (0,) * len(rows)


def union(left: Sequence[int], right: Sequence[int]) -> Rows:
    return tuple([a | b for a, b in zip(left, right, strict=True)])


def minus(left: Sequence[int], right: Sequence[int]) -> Rows:
    return tuple([a & ~b for a, b in zip(left, right, strict=True)])


def common(left: Sequence[int], right: Sequence[int]) -> Rows:
    return tuple([a & b for a, b in zip(left, right, strict=True)])


def cells_in(rows: Sequence[int]) -> int:
    return sum(map(int.bit_count, rows))


def useful(demand: Demand, held: Sequence[int], missing: Sequence[int]) -> Rows:
    """The missing cells that could make the answer longer than `held` alone allows.

    A longer answer ends behind chunk `best`, so a window row never needs cells further back than its reach.
    """
    best = demand.layout.best(demand.fold(held))
    if best == demand.layout.best(demand.fold(demand.required)):
        return none_of(missing)
    result = []
    for row, cells in zip(demand.layout.rows, missing, strict=True):
        reach = _reach_chunks(demand.layout, row.group)
        first = 0 if reach is None else max(0, best + 1 - reach)
        result.append(cells >> first << first)
    return tuple(result)


def worst_case_bytes(demand: Demand, missing: Sequence[int]) -> int:
    """An upper bound of the bytes that any plan over `missing` can load."""
    total = 0
    for row, cells, size in zip(demand.layout.rows, missing, demand.layout.cell_bytes_rows, strict=True):
        reach = _reach_chunks(demand.layout, row.group)
        count = cells.bit_count()
        total += size * (count if reach is None else min(count, reach))
    return total


def plan(
    demand: Demand,
    *,
    present: Sequence[int],
    loading: Sequence[int],
    found: Sequence[Sequence[int]],
    budget_bytes: int,
) -> Plan:
    """The greatest affordable length and one source for each of its cells. See the module text."""
    assert budget_bytes >= 0
    assert minus(present, demand.required) == none_of(present), "a lease outside the demand"
    joinable = minus(loading, present)
    free = union(present, joinable)
    anywhere: Rows = free
    for rows in found:
        anywhere = union(anywhere, rows)
    length = _greatest_affordable(demand, demand.fold(common(anywhere, demand.required)), free, budget_bytes)
    needed = demand.needed(length)
    loads, unlocks = _assign(minus(needed, free), found)
    result = Plan(
        length,
        kept=common(needed, present),
        spare=minus(present, needed),
        joined=common(needed, joinable),
        loads=loads,
        unlocks=unlocks,
        load_bytes=sum(demand.bytes_of(rows) for rows in loads),
    )
    _check(result, needed, budget_bytes)
    return result


def _assign(wanted: Rows, found: Sequence[Sequence[int]]) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Each wanted cell goes to the first adapter that found it; the rest of every adapter's locks is returned."""
    loads = []
    unlocks = []
    for rows in found:
        taken = common(wanted, rows)
        wanted = minus(wanted, taken)
        loads.append(taken)
        unlocks.append(minus(rows, taken))
    return tuple(loads), tuple(unlocks)


def _check(made: Plan, needed: Rows, budget_bytes: int) -> None:
    """Every needed cell has one source; nothing is loaded beyond the grant."""
    sources = (made.kept, made.joined, *made.loads)
    covered = none_of(needed)
    for rows in sources:
        assert common(covered, rows) == none_of(needed), "a cell has two sources"
        covered = union(covered, rows)
    assert covered == needed, "a needed cell has no source"
    assert made.load_bytes <= budget_bytes, "the plan exceeds its grant"


def _greatest_affordable(demand: Demand, lengths: int, free: Rows, budget_bytes: int) -> int:
    assert lengths & 1, "length 0 is always servable"
    best = lengths.bit_length() - 1
    if _cost(demand, best, free) <= budget_bytes:
        return best
    ceiling = _ceiling(demand, free, best, budget_bytes)
    candidates = lengths & ((2 << ceiling) - 1)
    while candidates:
        length = candidates.bit_length() - 1
        if _cost(demand, length, free) <= budget_bytes:
            return length
        candidates ^= 1 << length
    raise AssertionError("length 0 costs nothing")


def _cost(demand: Demand, length: int, free: Rows) -> int:
    return demand.bytes_of(minus(demand.needed(length), free))


def _ceiling(demand: Demand, free: Rows, length_max: int, budget_bytes: int) -> int:
    """The greatest length whose full-attention rows alone fit. Equal rows are counted once, with their multiplicity."""
    lacking: dict[int, int] = {}
    rows = zip(demand.layout.rows, demand.required, free, demand.layout.cell_bytes_rows, strict=True)
    for row, required, have, size in rows:
        if _reach_chunks(demand.layout, row.group) is None:
            cells = required & ~have
            lacking[cells] = lacking.get(cells, 0) + size
    low, high = 0, length_max
    while low < high:
        middle = (low + high + 1) // 2
        mask = (1 << middle) - 1
        if sum((cells & mask).bit_count() * size for cells, size in lacking.items()) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _reach_chunks(layout: CacheLayout, group: int) -> int | None:
    """How many chunks before its end a length can need in rows of this group; None: all of them.

    One more than the window's chunks: the last-token rule of a full hit can ask for it.
    """
    spec = layout.groups[group]
    if spec.kind is GroupKind.FULL:
        return None
    if spec.kind is GroupKind.RECURRENT:
        return 1
    assert spec.window_tokens is not None
    return -(-(spec.window_tokens - 1) // layout.chunk_tokens) + 1
