"""`TableManager`: which blocks a request needs in each group, and moving them between request and pool.

With P tokens computed and a step that will compute up to `target`, the table of a group needs real blocks at

    full        every block of [0, target)
    window W    the blocks of [max(0, P - W + 1), target); earlier ones are the null block
    recurrent   the page of the boundary before P (the state to continue from) and the page of token target - 1

so a recurrent table has real pages only where a step ended: steps of a prompt end at boundaries (`cut_step`), and so do
loads (`check_promise`). Blocks that fell out are given back at the next allocation or at the end, not before: that is
when the engine looks. Holders and their duties are described in `block_pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvcore.connectors.views import NULL_BLOCK
from kvcore.errors import CallerError, PeerError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.sim.engine.block_pool import BlockNames, BlockPool
from kvcore.sim.engine.request import Request

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class LocalHit:
    """A prefix found in the engine's own cache.

    `tokens` is a multiple of every group's block; or it is n-1 (the whole prompt was found), inside a block: then
    `copy_sources` names each group's last block, to be copied into a private one.
    """

    tokens: int
    blocks: tuple[list[int], ...]
    copy_sources: tuple[int, ...] = ()


class TableManager:
    def __init__(self, layout: CacheLayout, pool: BlockPool, names: BlockNames, step_tokens_max: int) -> None:
        self.groups: tuple[ObjectGroup, ...] = layout.groups
        self.pool = pool
        self._names = names
        self._step_tokens_max = step_tokens_max
        self.block_tokens_lcm = lcm(*(group.block_tokens for group in layout.groups))
        recurrent = [group.block_tokens for group in layout.groups if group.kind is GroupKind.RECURRENT]
        self._recurrent_tokens = lcm(*recurrent) if recurrent else 0
        if step_tokens_max < self._recurrent_tokens:
            raise CallerError(
                f"max_batched_tokens {step_tokens_max} is less than a recurrent block of"
                f" {self._recurrent_tokens} tokens: prefill could never reach a boundary"
            )
        self._full = [g for g, group in enumerate(layout.groups) if group.kind is GroupKind.FULL]
        self._other = [g for g, group in enumerate(layout.groups) if group.kind is not GroupKind.FULL]

    # -- where steps and loads end

    def cut_step(self, request: Request, computed: int, count: int) -> int:
        """`count` tokens from `computed` on, less what is behind the last recurrent boundary that they reach."""
        block_tokens = self._recurrent_tokens
        if not block_tokens:
            return count
        last_boundary = (request.length - 1) // block_tokens * block_tokens
        if computed >= last_boundary:
            return count
        end = min(computed + count, last_boundary) // block_tokens * block_tokens
        return max(0, end - computed)

    def check_promise(self, request: Request, local: int, external: int) -> None:
        """Raise PeerError if a load of `external` tokens behind `local` ones would end where no load can."""
        if not 0 <= external <= request.length - 1 - local:
            raise PeerError(
                f"the connector promised {external} tokens for {request.request_id!r}, which has {request.length}"
                f" and {local} of them locally: at most n-1 can be loaded"
            )
        if external and self._recurrent_tokens and (local + external) % self._recurrent_tokens:
            raise PeerError(f"the connector promised {request.request_id!r} a recurrent state inside a block")

    # -- needs

    def blocks_max(self, tokens: int) -> int:
        """Enough blocks for one request to reach `tokens`, whatever its steps look like."""
        total = 0
        for group in self.groups:
            blocks = _ceil_div(tokens, group.block_tokens)
            if group.kind is GroupKind.WINDOW:
                blocks = min(blocks, _ceil_div(_window(group) + self._step_tokens_max, group.block_tokens) + 2)
            elif group.kind is GroupKind.RECURRENT:
                blocks = min(blocks, 3)
            total += blocks
        return total

    def blocks_lacking(self, request: Request) -> int:
        """Blocks that a request which holds some still needs for all its tokens; what loads must leave free for it.

        Null entries of a window are no blocks: who counts them as held reserves too little, and two loads can hold
        what each of them needs.
        """
        total = 0
        for group, table in zip(self.groups, request.tables, strict=True):
            need = self._blocks_at_once(group, request.length, request.computed)
            if group.kind is GroupKind.WINDOW:
                last = _ceil_div(min(request.length, request.computed + self._step_tokens_max), group.block_tokens)
                need = last - self._first_needed(group, request.computed)
            total += max(0, need - table.held_count)
        return total

    def blocks_whole(self, request: Request, hit: LocalHit, computed: int) -> int:
        """Free blocks without which the request, admitted with this hit, could not reach its last token."""
        total = 0
        for g, group in enumerate(self.groups):
            have = 0
            if group.kind is not GroupKind.RECURRENT:
                have = max(self._first_needed(group, computed), len(hit.blocks[g]))
            total += max(0, self._blocks_at_once(group, request.length, computed) - have)
        shared = [self._still_needed(g, hit, computed) for g in range(len(self.groups))]
        return total + self.pool.idle_among([block for blocks in (*shared, hit.copy_sources) for block in blocks])

    def _blocks_at_once(self, group: ObjectGroup, tokens: int, computed: int) -> int:
        """Table entries up to `tokens`; a window gives its first ones back, so it never holds more than this."""
        blocks = _ceil_div(tokens, group.block_tokens)
        if group.kind is GroupKind.WINDOW:
            return min(blocks, _ceil_div(_window(group) - 1 + self._step_tokens_max, group.block_tokens) + 1)
        if group.kind is GroupKind.RECURRENT:  # the state to continue from and the one to write
            return min(2, _ceil_div(min(tokens, computed + self._step_tokens_max), group.block_tokens))
        return blocks

    def grow(self, request: Request, target: int) -> tuple[list[int], ...] | None:
        """Blocks for tokens [computed, target) of a request with a table; None: too few, nothing was taken."""
        self.trim(request)
        wanted = [
            self._wanted(g, len(request.tables[g].ids), request.computed, target) for g in range(len(self.groups))
        ]
        if sum(map(len, wanted)) > self.pool.free_count:
            return None
        return self._take(request, wanted, target)

    def admit(
        self, request: Request, hit: LocalHit, computed: int, target: int, *, reserved: int = 0
    ) -> tuple[list[int], ...] | None:
        """First blocks: `hit` is shared, the rest of [0, target) is taken; `computed` tokens will need no computing.

        None: the pool cannot give them and keep `reserved` blocks free.
        """
        assert not request.holds_blocks()
        shared = [self._still_needed(g, hit, computed) for g in range(len(self.groups))]
        wanted = [self._wanted(g, len(shared[g]), computed, target) for g in range(len(self.groups))]
        pulled = self.pool.idle_among([block for blocks in (*shared, hit.copy_sources) for block in blocks])
        if sum(map(len, wanted)) + pulled + reserved > self.pool.free_count:
            return None
        for g, blocks in enumerate(shared):
            for block in blocks:
                if block != NULL_BLOCK:
                    self.pool.share(block, request.request_id)
            request.tables[g].extend(blocks)
            request.published[g] = len(blocks)
        for block in hit.copy_sources:
            self.pool.share(block, request.request_id)
        return self._take(request, wanted, target)

    def load_targets(self, request: Request) -> list[int]:
        """Blocks that must be filled from outside: those of tokens [local, local + external) that are not null."""
        targets: list[int] = []
        for group, table in zip(self.groups, request.tables, strict=True):
            first = request.local // group.block_tokens
            end = -(-(request.local + request.external) // group.block_tokens)
            targets.extend(block for block in table.ids[first:end] if block != NULL_BLOCK)
        return targets

    def valid_prefix(self, request: Request, bad: Sequence[int]) -> int:
        """Tokens before the first bad block. With several groups, or one that forgets blocks, no telling: 0."""
        if len(self.groups) > 1 or self.groups[0].kind is not GroupKind.FULL:
            return 0
        ids, block_tokens = request.tables[0].ids, self.groups[0].block_tokens
        first = min(ids.index(block) for block in bad)
        return first * block_tokens

    def free(self, request: Request) -> None:
        for g, table in enumerate(request.tables):
            self.pool.release(table.held(), request.request_id)
            table.clear()
            request.published[g] = 0

    def _take(self, request: Request, wanted: Sequence[Sequence[int]], target: int) -> tuple[list[int], ...]:
        taken: list[list[int]] = []
        for g, indices in enumerate(wanted):
            blocks = self.pool.take(len(indices), request.request_id)
            table = request.tables[g]
            start = len(table.ids)
            entries = [int(NULL_BLOCK)] * max(0, _ceil_div(target, self.groups[g].block_tokens) - start)
            for index, block in zip(indices, blocks, strict=True):
                entries[index - start] = block
            if entries:
                table.extend(entries)
            taken.append(blocks)
        return tuple(taken)

    def _wanted(self, g: int, have: int, computed: int, target: int) -> Sequence[int]:
        """Table indices from `have` on that need a real block."""
        group = self.groups[g]
        need = _ceil_div(target, group.block_tokens)
        if group.kind is GroupKind.RECURRENT:
            pages = {(computed - 1) // group.block_tokens, need - 1} if computed else {need - 1}
            return sorted(index for index in pages if index >= have)
        return range(max(have, self._first_needed(group, computed)), need)

    def _first_needed(self, group: ObjectGroup, computed: int) -> int:
        """Table entries below this one will not be read again once `computed` tokens are there."""
        if group.kind is GroupKind.WINDOW:
            return max(0, computed - _window(group) + 1) // group.block_tokens
        if group.kind is GroupKind.RECURRENT:
            return max(0, computed - 1) // group.block_tokens
        return 0

    def _still_needed(self, g: int, hit: LocalHit, computed: int) -> list[int]:
        first = self._first_needed(self.groups[g], computed)
        return [block if index >= first else NULL_BLOCK for index, block in enumerate(hit.blocks[g])]

    def trim(self, request: Request) -> None:
        """Give back what fell out of the windows."""
        for g, table in enumerate(request.tables):
            first = min(self._first_needed(self.groups[g], request.computed), len(table.ids))
            dropped = [index for index in range(table.trimmed, first) if table.ids[index] != NULL_BLOCK]
            self.pool.release([table.ids[index] for index in reversed(dropped)], request.request_id)
            for index in dropped:
                table.set_null(index)
            table.trimmed = max(table.trimmed, first)

    # -- the engine's own prefix cache

    def publish(self, request: Request) -> None:
        """Name the whole blocks of [0, computed). Called only when `request.computed` is known to be valid."""
        for g, group in enumerate(self.groups):
            full_blocks = request.computed // group.block_tokens
            if full_blocks <= request.published[g]:
                continue
            chain, ids = self._chain(request, g), request.tables[g].ids
            first = request.published[g]
            if group.kind is GroupKind.RECURRENT:  # a page is a snapshot only if its step ended at the boundary
                first = full_blocks - 1 if request.computed % group.block_tokens == 0 else full_blocks
            for index in range(first, full_blocks):
                if ids[index] != NULL_BLOCK:
                    self.pool.publish(ids[index], g, chain[index])
            request.published[g] = full_blocks

    def local_hit(self, request: Request) -> LocalHit:
        """The longest prefix of whole blocks in the cache: at most n-1 tokens."""
        step = self.block_tokens_lcm
        tokens = min(self._leading(request), request.length - 1) // step * step
        while tokens and not self._serves(request, tokens, tokens):
            tokens -= step
        return LocalHit(tokens, self._hit_blocks(request, tokens, tokens))

    def partial_hit(self, request: Request) -> LocalHit | None:
        """n-1 tokens, when the blocks of the whole prompt are there. A recurrent state cannot be cut: None."""
        length, used = request.length, request.length - 1
        if self._recurrent_tokens or length % self.block_tokens_lcm or self._leading(request) < length or used == 0:
            return None
        if not self._serves(request, length, used):
            return None
        blocks = self._hit_blocks(request, length, used)
        shared = tuple(ids[: used // group.block_tokens] for ids, group in zip(blocks, self.groups, strict=True))
        return LocalHit(used, shared, tuple(ids[-1] for ids in blocks))

    def _chain(self, request: Request, g: int) -> list[int]:
        chain, block_tokens = request.names[g], self.groups[g].block_tokens
        if len(chain) < request.length // block_tokens:
            self._names.extend(chain, request.spec.cache_salt, request.token_bytes(), block_tokens * TOKEN_BYTES)
        return chain

    def _leading(self, request: Request) -> int:
        """Tokens of the leading blocks that every full-attention group has."""
        tokens = request.length
        for g in self._full:
            chain, block_tokens, count = self._chain(request, g), self.groups[g].block_tokens, 0
            while count < len(chain) and self.pool.find(g, chain[count]) is not None:
                count += 1
            tokens = min(tokens, count * block_tokens)
        return tokens

    def _serves(self, request: Request, tokens: int, used: int) -> bool:
        """Can the groups other than full serve `used` computed tokens from whole blocks of [0, tokens)?"""
        for g in self._other:
            chain, block_tokens = self._chain(request, g), self.groups[g].block_tokens
            for index in range(self._first_needed(self.groups[g], used), tokens // block_tokens):
                if self.pool.find(g, chain[index]) is None:
                    return False
        return True

    def _hit_blocks(self, request: Request, tokens: int, used: int) -> tuple[list[int], ...]:
        """Tables for a hit. Windows may lack some leading blocks: an external hit that goes further needs fewer."""
        tables = []
        for g, group in enumerate(self.groups):
            chain = self._chain(request, g)
            first = self._first_needed(group, used)
            table = [int(NULL_BLOCK)] * min(first, tokens // group.block_tokens)
            for index in range(first, tokens // group.block_tokens):
                block = self.pool.find(g, chain[index])
                assert block is not None, "a hit is made of blocks that were found"
                table.append(block)
            tables.append(table)
        return tuple(tables)


def _window(group: ObjectGroup) -> int:
    assert group.window_tokens is not None
    return group.window_tokens


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
