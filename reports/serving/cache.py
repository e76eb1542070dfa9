"""The production core around one worker: L1 on a virtual arena, stores behind it, leases, plans, publishing.

Theory of operation
-------------------
Every decision about what is cached is the product's: `kvcore.l1.L1Cache` (with its leases, room and eviction order)
over `kvcore.memory.VirtualArena`, `kvcore.planner.plan` with `kvcore.groups.CacheLayout` for what can be served and
from where. No bytes move. A store behind L1 is an L1Cache too: the same eviction and accounting, the locks of a lookup
as its read leases.

One request, in order:

1. `find`     lease in L1 and lock in the stores whatever of the prompt is there.
2. `plan`     the longest prefix from L1 alone, with the first store, with the first two, ... ; each is an offer.
3. `take`     the chosen plan: give back what it does not use, stage what comes from stores.
4. `arrived`  a store's cells are published in L1 and leased in one step; the store's locks are returned.
   `part`     what could be served of a load that is stopped now, and `stop`: give back the rest.
5. `release`  the GPU has them: the leases end; L1 evicts the beginning of a prompt last.
6. `store`    the prompt is computed: reserve, write, publish its chunks, in L1 and in every store.

Left out: two loads of one cell do not join (the second is discarded when it comes to publishing, as the product does
with two writers), a load has no deadline, and writing takes no time on any line (it goes the other way).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.admission import Offer
from kvcore.answers import Answer
from kvcore.bitmap import bits, ones
from kvcore.groups import CacheLayout
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.leases import Owner
from kvcore.planner import Demand, Plan, demand_of, none_of, plan

BUDGET_BYTES = 1 << 62
Keys = list[Sequence[ObjectKey]]
_RESERVED, _UNKNOWN = Answer.RESERVED, Answer.UNKNOWN


class Held:
    """What one request has leased: presence per cache (L1 first) and row. Made by `find`, emptied by `release`."""

    __slots__ = ("chunks", "keys", "owner", "prompt_tokens", "rows", "tag")

    def __init__(self, name: str, keys: Keys, prompt_tokens: int) -> None:
        self.owner = Owner(name, 0, "load")
        self.tag = name
        self.keys = keys
        self.chunks = len(keys[0])
        self.prompt_tokens = prompt_tokens
        self.rows: list[tuple[int, ...]] = []


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and what it hauls: `offer` for the admission; `tokens` of the prompt that it serves."""

    plan: Plan
    offer: Offer
    depth: int


class Cache:
    """One worker's view: its L1 and the stores behind it, in order."""

    def __init__(self, layout: CacheLayout, l1: L1Cache, stores: Sequence[L1Cache] = ()) -> None:
        self.chunk_tokens = layout.chunk_tokens
        self._layout = layout
        self._places = [l1, *stores]
        self._l1 = l1

    def find(self, held: Held) -> bool:
        """Lease what is there; is anything?"""
        held.rows = [self._lease(place, held) for place in self._places]
        return any(map(any, held.rows))

    def _lease(self, place: L1Cache, held: Held) -> tuple[int, ...]:
        return tuple([_bitset(place.reserve_read(held.owner, row)) for row in held.keys])

    def choices(self, held: Held) -> list[Choice]:
        """Ascending: L1 alone, with one store, with two; those that serve no more than the one before are left out."""
        found: list[Choice] = []
        for depth in range(len(self._places)):
            if depth and not any(held.rows[depth]):
                continue
            choice = self.choose(held, depth)
            if choice.offer.tokens > (found[-1].offer.tokens if found else 0):
                found.append(choice)
        return found

    def choose(self, held: Held, depth: int, chunks: int | None = None, skip_chunks: int = 0) -> Choice:
        """The longest prefix from the first `depth` stores and L1, of at most `chunks`, behind those skipped."""
        demand = self._demand(held, chunks, skip_chunks)
        asked = demand.required
        inside = [tuple([row & mask for row, mask in zip(rows, asked)]) for rows in held.rows[: depth + 1]]
        made = plan(demand, present=inside[0], loading=none_of(asked), found=inside[1:], budget_bytes=BUDGET_BYTES)
        tokens = self._layout.usable_tokens(made.length, held.prompt_tokens)
        hauls = [(at, demand.bytes_of(rows)) for at, rows in enumerate(made.loads, 1)]
        hauls.append((0, demand.bytes_of(made.kept) + made.load_bytes))
        return Choice(made, Offer(tokens, tuple([haul for haul in hauls if haul[1]])), depth)

    def part(self, held: Held, depth: int, share: float) -> Choice:
        """What L1 could serve if the haul from `depth` stopped with that share of its chunks, the first ones, here.

        From host memory itself (depth 0) these are in the GPU already: nothing is to be hauled.
        """
        there = self._part_of(held.rows[depth], share)
        if depth:
            there = tuple([have | more for have, more in zip(held.rows[0], there)])
        demand = self._demand(held, None, 0)
        made = plan(demand, present=there, loading=none_of(there), found=(), budget_bytes=0)
        tokens, size = self._layout.usable_tokens(made.length, held.prompt_tokens), demand.bytes_of(made.kept)
        return Choice(made, Offer(tokens, ((0, size),) if depth and size else ()), 0)

    def bytes_of(self, held: Held, choice: Choice) -> int:
        """What the choice uses from host memory."""
        return self._demand(held, None, 0).bytes_of(choice.plan.kept)

    def _part_of(self, rows: Sequence[int], share: float) -> tuple[int, ...]:
        chunks = 0
        for row in rows:
            chunks |= row
        at = list(bits(chunks))
        count = int(share * len(at))
        end = ones(at[count]) if count < len(at) else chunks
        return tuple([row & end for row in rows])

    def stop(self, held: Held, depth: int, share: float) -> None:
        """The load ends here: keep what `part` has counted on, in L1, and nothing else."""
        there = self._part_of(held.rows[depth], share)
        for at in range(1, len(held.rows)):
            keep = there if at == depth else none_of(there)
            for keys in self._keys(held, [have & ~kept for have, kept in zip(held.rows[at], keep)]):
                if keys:
                    self._l1.abort_write(held.tag, keys)
            self._keep(held, at, keep)
        if depth:
            self.arrived(held, depth)
        else:
            self._keep(held, 0, there)

    def _demand(self, held: Held, chunks: int | None, skip_chunks: int) -> Demand:
        count = held.chunks if chunks is None else min(chunks, held.chunks)
        everything = [ones(count)] * len(self._layout.rows)
        return demand_of(self._layout, count, held.prompt_tokens, everything, skip_chunks)

    def take(self, held: Held, choice: Choice) -> bool:
        """Keep what the plan uses. False: L1 had no room for what comes from the stores; then nothing is staged."""
        made = choice.plan
        staged = [self._keys(held, rows) for rows in made.loads]
        for row, keys in enumerate(zip(*staged)):
            size = self._layout.cell_bytes_rows[row]
            wanted = [key for part in keys for key in part]
            if wanted and Answer.NO_SPACE in self._l1.reserve_write(held.tag, wanted, size)[0]:
                self._l1.abort_write(held.tag, self._l1.staging_keys(held.tag))
                return False
        self._keep(held, 0, made.kept)
        for depth in range(1, len(self._places)):
            self._keep(held, depth, made.loads[depth - 1] if depth <= len(made.loads) else none_of(made.kept))
        return True

    def arrived(self, held: Held, depth: int) -> None:
        """The cells from store `depth` are in host memory."""
        rows = held.rows[depth]
        merged = []
        for row, keys in enumerate(self._keys(held, rows)):
            answers = self._l1.finish_write_and_reserve_read(held.tag, keys, (held.owner,))
            assert _UNKNOWN not in answers, "staged by take, and nothing ends it before this"
            merged.append(held.rows[0][row] | rows[row])
        self._keep(held, depth, none_of(rows))
        held.rows[0] = tuple(merged)

    def release(self, held: Held) -> None:
        """Give everything back."""
        for depth in range(len(held.rows)):
            self._keep(held, depth, none_of(held.rows[depth]))

    def store(self, held: Held, from_chunk: int) -> None:
        """The prompt's chunks are computed: publish those that are not there, where there is room.

        L1 evicts the end of what is published or given back in one call before its beginning.
        """
        for place in self._places:
            for row, size in enumerate(self._layout.cell_bytes_rows):
                keys = held.keys[row][from_chunk:]
                if not keys:
                    continue
                answers, _ = place.reserve_write(held.tag, keys, size)
                granted = [key for key, answer in zip(keys, answers) if answer is _RESERVED]
                if granted:
                    place.finish_write(held.tag, granted)

    def _keep(self, held: Held, depth: int, rows: Sequence[int]) -> None:
        """Give back all leases in a cache that are not in `rows`."""
        place = self._places[depth]
        for row, (have, keep) in enumerate(zip(held.rows[depth], rows)):
            extra = have & ~keep
            if extra:
                keys = [held.keys[row][at] for at in bits(extra)]
                place.finish_read(held.owner, keys)
        held.rows[depth] = tuple(rows)

    def _keys(self, held: Held, rows: Sequence[int]) -> list[list[ObjectKey]]:
        return [[keys[at] for at in bits(cells)] for keys, cells in zip(held.keys, rows)]


def _bitset(answers: Sequence[Answer]) -> int:
    """Bit i: answer i is RESERVED."""
    if _UNKNOWN not in answers:
        return ones(len(answers))
    if _RESERVED not in answers:
        return 0
    return int("".join(["1" if answer is _RESERVED else "0" for answer in reversed(answers)]), 2)
