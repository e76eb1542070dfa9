"""What the scheduler side remembers of one request. Pure.

Theory of operation
-------------------
A request lives through *generations*: one per attempt to run it. A preemption, a failed load that leaves nothing, a
local prefix that shrank under a lookup end the generation; block ids, leases and the store position of the old one are
forgotten, and nothing of it answers for the new.

    IDLE --look--> LOOKING --fix--> KNOWN --take_load--> LOADING --end_load--> RUNNING
    IDLE / LOOKING / KNOWN --decline (nothing to load)-------------------------> RUNNING
    any --next_generation--> IDLE

1. A lookup is made for `looked_up_tokens` tokens on top of `skip_chunks` chunks that the engine has. Its answer, a set
   of servable lengths, is fixed once. It answers for a later question iff the tokens are the same and the engine still
   has those chunks (`answers`); a local prefix that has *grown* only makes the promise shorter.
2. `promise(local)` is a function of the fixed answer, and of the length that was chosen from it, once:
   0 <= promised <= n - 1 - local. Asking twice changes nothing.
3. One load per generation at most. Until every rank has reported it, its blocks are *watched*. So are blocks that a
   request admitted in the same step found in the engine's own cache while they are still being filled for another.
4. While anything is watched the request is not *confirmed*: what the forward pass computes may rest on garbage, and
   nothing of it is stored. Reports may come rank by rank, over several steps; the first bad chunk of them all counts.
5. A failed load takes back everything from its first bad chunk on: computed tokens and what counted as cached.
   Otherwise an abort before the next step would store what was computed over the hole.
6. Stores go by `stored_chunks`, which within a generation only grows, so its stores are disjoint and increasing. Chunks
   [skip, length) that were loaded are not stored: they came from the cache. Chunks below `skip` are: nobody has asked
   whether the cache has them, and what it has it refuses cheaply.
7. Only tokens that are computed *and* accepted count: min(end of the step, tokens known). The last sampled token and
   draft tokens have positions that no accepted token has yet.

Rejected: deriving the phase from several flags (each fix for one hazard broke another); a "confirmed" flag that the
next step sets (a request may end before there is a next step).

Who holds: the leases of a generation are held by the cache servers under (session, generation); `leased` says whether
they may hold any. Who announces done: the lookup client (`fix`), the workers' reports (`end_load`). Who frees:
`SchedulerConnector`, when `leased` is set, on every way out of a generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from kvcore.connectors.cells import chunks_of_blocks, load_cells, store_cells
from kvcore.connectors.plan import CellBlocks
from kvcore.connectors.views import NULL_BLOCK, BlockTable
from kvcore.groups import CacheLayout


@unique
class Phase(Enum):
    IDLE = "idle"
    LOOKING = "looking"
    KNOWN = "known"
    LOADING = "loading"
    RUNNING = "running"


_MOVES = frozenset(
    {
        (Phase.IDLE, Phase.LOOKING),
        (Phase.LOOKING, Phase.KNOWN),
        (Phase.KNOWN, Phase.LOADING),
        (Phase.LOADING, Phase.RUNNING),
        (Phase.IDLE, Phase.RUNNING),
        (Phase.LOOKING, Phase.RUNNING),
        (Phase.KNOWN, Phase.RUNNING),
    }
)
"""All moves within a generation; a new generation begins at IDLE."""

_NO_CHUNKS = range(0)


@dataclass(slots=True)
class RequestTracker:
    """One request of the engine, from the first question to its end. Fields are written by the methods only.

    `tokens` are those known when the last step was built; `hashes` of their full chunks, kept over generations.
    `computed_tokens` counts those that are computed once that step has run. `outdated`: the hashes are those of another
    life of the keys; this generation stores nothing more, and the next one hashes anew.
    """

    layout: CacheLayout
    request_id: str
    session: str
    generation: int
    cache_salt: str = ""
    extras: tuple[tuple[int, int, bytes], ...] = ()
    # of the request
    tokens: Sequence[int] = ()
    hashes: list[bytes] = field(default_factory=list)
    resumed: bool = False  # an attempt that had computed something was lost
    load_failures: int = 0
    # of the generation
    outdated: bool = False
    phase: Phase = Phase.IDLE
    leased: bool = False  # the servers may hold leases for it
    hurried: bool = False  # its lookup was told to end with what is there
    lengths: int = 1  # servable lengths as a bit set; bit 0 is always set
    chosen: int | None = None  # chunks that the admission promises; None: all that were found
    looked_up_tokens: int = 0
    skip_chunks: int = 0
    local_tokens: int = 0  # the engine's own prefix at the last question
    promised_tokens: int = 0
    delivered_tokens: int = 0  # the prefix that is complete after a good load; 0: there was none
    computed_tokens: int = 0
    step_tokens: tuple[int, int] = (0, 0)  # [start, end) of the last step, as far as it can be relied on
    stored_chunks: int = 0
    cached_chunks: range = _NO_CHUNKS  # loaded, hence in the cache
    stores_planned: bool = False  # workers may still read blocks of this generation
    watched: dict[int, int] = field(default_factory=dict)  # block -> chunk, of loads not reported yet
    bad_chunk: int | None = None  # first one that was reported bad

    # ------------------------------------------------------------------ generations

    def next_generation(self, generation: int) -> None:
        """Forget everything that belonged to the last attempt. The caller has given back its leases."""
        assert generation > self.generation, "a generation is never used twice"
        assert not self.leased, "leases of a generation are given back before it ends"
        self.generation = generation
        if self.outdated:
            self.hashes, self.outdated = [], False
        self.resumed = self.resumed or self.computed_tokens > 0
        self.phase = Phase.IDLE
        self.lengths, self.chosen, self.hurried = 1, None, False
        self.looked_up_tokens = self.skip_chunks = 0
        self.local_tokens = self.promised_tokens = self.delivered_tokens = 0
        self.computed_tokens = self.stored_chunks = 0
        self.step_tokens = (0, 0)
        self.cached_chunks = _NO_CHUNKS
        self.stores_planned = False
        self.watched = {}
        self.bad_chunk = None

    def _move(self, phase: Phase) -> None:
        assert (self.phase, phase) in _MOVES, f"{self.request_id}: {self.phase.value} -> {phase.value}"
        self.phase = phase

    # ------------------------------------------------------------------ the lookup

    @property
    def length(self) -> int:
        """The length that is promised, in chunks: the greatest servable one, unless the admission chose another."""
        return self.layout.best(self.lengths) if self.chosen is None else self.chosen

    def answers(self, tokens: int, local_tokens: int) -> bool:
        """May this generation answer a question for `tokens` tokens, of which the engine has `local_tokens`?"""
        if self.phase is Phase.IDLE:
            return True
        if self.phase in (Phase.LOADING, Phase.RUNNING):
            return False  # whoever asks again has given the attempt up
        return self.looked_up_tokens == tokens and local_tokens // self.layout.chunk_tokens >= self.skip_chunks

    def look(self, tokens: Sequence[int], local_tokens: int) -> None:
        """A lookup begins; leases may be taken for it from now on."""
        assert not self.leased
        assert 0 <= local_tokens < len(tokens)
        self._move(Phase.LOOKING)
        self.tokens = tokens
        self.leased = True
        self.looked_up_tokens = len(tokens)
        self.skip_chunks = local_tokens // self.layout.chunk_tokens

    def fix(self, lengths: int) -> None:
        """The servers have answered; the answer does not change any more."""
        assert lengths & 1, "no prefix at all is always servable"
        assert (lengths.bit_length() - 1) * self.layout.chunk_tokens <= self.looked_up_tokens
        self._move(Phase.KNOWN)
        self.lengths = lengths

    def choose(self, length: int) -> None:
        """Promise only so many chunks, in this generation. Once, before anything was promised."""
        assert self.phase is Phase.KNOWN
        assert self.chosen is None, "what is decided stays so"
        assert self.lengths >> length & 1, "not a length that was found servable"
        self.chosen = length

    def promise(self, local_tokens: int) -> int:
        """Tokens beyond `local_tokens` that the cache supplies."""
        assert self.phase is Phase.KNOWN
        assert local_tokens // self.layout.chunk_tokens >= self.skip_chunks, "the lookup relied on more than there is"
        usable = self.layout.usable_tokens(self.length, self.looked_up_tokens)
        self.local_tokens = local_tokens
        self.promised_tokens = max(0, usable - local_tokens)
        assert self.promised_tokens == 0 or local_tokens + self.promised_tokens <= self.looked_up_tokens - 1
        return self.promised_tokens

    # ------------------------------------------------------------------ allocation and load

    def decline(self) -> None:
        """The request runs without a load. The caller gives back the leases."""
        assert not self.watched
        self._move(Phase.RUNNING)

    def take_load(self, blocks: BlockTable) -> list[CellBlocks]:
        """Blocks were allocated for the promise: the cells to load into them. Watched until `end_load`."""
        assert self.leased, "loads rely on leases"
        assert self.promised_tokens > 0
        skip = self.local_tokens // self.layout.chunk_tokens
        rows = self.layout.unfold(self.length, self.looked_up_tokens, skip)
        needed = rows[: len(self.layout.groups)]  # the rule is the same on every rank
        cells = load_cells(self.layout, self.hashes, needed, blocks, self.local_tokens)
        assert all(cell.chunk >= skip for cell in cells), "a load into the engine's own prefix"
        self._move(Phase.LOADING)
        self.cached_chunks = range(self.skip_chunks, self.length)
        self.watched = {block: cell.chunk for cell in cells for block in cell.blocks if block != NULL_BLOCK}
        return cells

    def watch(self, loading: frozenset[int], blocks: BlockTable) -> None:
        """This request was admitted while `loading` blocks are being filled; do not rely on those it shares."""
        self.watched.update(chunks_of_blocks(self.layout, blocks, loading))

    def note_errors(self, blocks: frozenset[int]) -> None:
        """One rank has reported these; the other ranks' reports may follow in later steps."""
        bad = [chunk for block, chunk in self.watched.items() if block in blocks]
        if bad:
            self.bad_chunk = min(bad) if self.bad_chunk is None else min(self.bad_chunk, *bad)

    def end_load(self, failed: bool) -> bool:
        """Every rank has reported. False: from `bad_chunk` on nothing is valid (`failed`: nothing at all is)."""
        assert self.phase in (Phase.LOADING, Phase.RUNNING)
        assert self.stored_chunks == 0, "nothing is stored before the load is confirmed"
        loaded = self.phase is Phase.LOADING
        bad = 0 if failed else self.bad_chunk
        self.watched, self.bad_chunk = {}, None
        if loaded:
            self._move(Phase.RUNNING)
        if bad is not None:
            self._take_back(bad)
            self.load_failures += loaded
        elif loaded:
            self.delivered_tokens = self.local_tokens + self.promised_tokens
        assert self.confirmed
        return bad is None

    def _take_back(self, chunk: int) -> None:
        """Chunks from `chunk` on hold no valid KV, whatever was computed on top of them."""
        self.computed_tokens = min(self.computed_tokens, chunk * self.layout.chunk_tokens)
        self.step_tokens = (0, 0)
        cached = self.cached_chunks
        self.cached_chunks = range(cached.start, max(cached.start, min(cached.stop, chunk)))
        assert self.computed_tokens // self.layout.chunk_tokens <= chunk

    @property
    def confirmed(self) -> bool:
        """No load that this request rests on is unreported."""
        return self.phase is not Phase.LOADING and not self.watched

    def has_delivered(self, local_tokens: int) -> bool:
        """The engine asks once more, after a good load and before it has used it: nothing is left to load."""
        if self.phase is not Phase.RUNNING or self.computed_tokens or not self.delivered_tokens:
            return False
        return local_tokens + self.layout.chunk_tokens > self.delivered_tokens

    # ------------------------------------------------------------------ steps and stores

    def schedule(self, computed: int, scheduled: int, tokens: Sequence[int]) -> None:
        """The step that is being built runs tokens [computed, computed + scheduled)."""
        assert self.phase in (Phase.LOADING, Phase.RUNNING)
        assert computed >= 0
        assert scheduled >= 0
        self.tokens = tokens
        self.step_tokens = (computed, computed + scheduled)
        self.computed_tokens = min(computed + scheduled, len(tokens))

    @property
    def chunks_due(self) -> int:
        """Full chunks whose KV can be relied on; 0 while a load is not confirmed, and when the keys have changed."""
        if self.outdated:
            return 0
        return self.computed_tokens // self.layout.chunk_tokens if self.confirmed else 0

    def take_stores(self, blocks: BlockTable) -> list[CellBlocks]:
        """The cells that are complete and were not yet given out in this generation. The caller has hashed `tokens`."""
        due = self.chunks_due
        if due <= self.stored_chunks:
            return []
        assert self.phase is Phase.RUNNING
        assert due <= len(self.hashes)
        assert due * self.layout.chunk_tokens <= len(self.tokens), "a chunk of tokens that nobody has accepted"
        chunks = [chunk for chunk in range(self.stored_chunks, due) if chunk not in self.cached_chunks]
        self.stored_chunks = due
        cells = store_cells(self.layout, self.hashes, chunks, blocks, self.step_tokens)
        self.stores_planned = self.stores_planned or bool(cells)
        return cells
