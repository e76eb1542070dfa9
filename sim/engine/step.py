"""One step: its plan, and the forward pass over paged memory.

Theory of operation
-------------------
`ForwardBatch` turns the scheduled requests into flat index arrays once per step; `ForwardPass` then runs layer after
layer with a fixed number of numpy calls, however many requests there are:

1. positions of all new tokens, concatenated; x_0 from the tokens.
2. Per attention layer and rank: write kv of the new positions to their slots; gather all blocks that any of the
   queries may see (one fancy index over the concatenated tables); multiply by the position weights; one running sum
   over everything; each query is the difference of two of its entries. What lies between requests (rest of a last
   block, tokens before a window) is in the sum but cancels out of every difference, exactly.
3. Per recurrent layer and rank: read the state before the first new position from its page, the closed form over the
   new positions, write the state after the last one to its page.
4. Partial outputs of the ranks are added up (`combine`), which gives the next layer's input.

Nothing is remembered from step to step: every visible word is read from the pages again. Null blocks are never read;
an assertion holds the engine to that.

A pass belongs to its step. Layers must run in order; `layer` may run on a device thread, one call at a time per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.connectors.views import BlockTable, Finished, ScheduledRequest, StepView
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.engine.probe import EngineProbe
from kvcore.sim.engine.request import Request
from kvcore.sim.model import U64, FingerprintModel, Index


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One request's share of a step: tokens [computed, computed + scheduled)."""

    request: Request
    computed: int
    scheduled: int
    new_blocks: BlockTable
    resumed: bool

    @property
    def samples(self) -> bool:
        return self.computed + self.scheduled == self.request.length


@dataclass(slots=True)
class StepPlan:
    """What the scheduler wants done.

    Blocks taken in this step: `fresh` ones are written by the forward pass first, `loading` ones by a load.
    `copies` are (source, target) blocks of partial local hits; the sources are held until the step has ended.
    """

    step: int
    entries: list[StepEntry] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    loading: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    copy_holders: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    meta: Any = None

    @property
    def tokens(self) -> int:
        return sum(entry.scheduled for entry in self.entries)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What came back: the sampled token of each entry that reached its end, and the connector's combined reports."""

    sampled: dict[str, int]
    finished: Finished = field(default_factory=Finished)
    error_blocks: frozenset[int] = frozenset()


def step_view(plan: StepPlan) -> StepView:
    """The plan as a connector sees it."""
    scheduled = tuple(
        ScheduledRequest(
            entry.request.request_id,
            entry.computed,
            entry.scheduled,
            entry.request.block_table(),
            entry.new_blocks,
            entry.resumed,
            entry.request.view().tokens,
        )
        for entry in plan.entries
    )
    allocated = frozenset(plan.fresh) | frozenset(plan.loading)
    return StepView(plan.step, scheduled, allocated, plan.preempted, plan.finished)


class _AttentionIndex:
    """Where one group's blocks, slots and sums are, for all requests of a step."""

    def __init__(self, batch: ForwardBatch, g: int, group: ObjectGroup, model: FingerprintModel) -> None:
        block_tokens, width = group.block_tokens, model.width
        ends = -(-batch.ends // block_tokens)
        window = group.window_tokens if group.kind is GroupKind.WINDOW else None
        firsts = np.zeros_like(ends) if window is None else np.maximum(batch.starts - window + 1, 0) // block_tokens
        counts = ends - firsts
        bases = np.cumsum(counts) - counts
        pieces = [
            entry.request.tables[g].array[first:end]
            for entry, first, end in zip(batch.entries, firsts.tolist(), ends.tolist(), strict=True)
        ]
        self.blocks: Index = np.concatenate(pieces)
        assert self.blocks.all(), "a visible position lies in the null block"
        block_positions = np.arange(len(self.blocks)) - np.repeat(bases - firsts, counts)
        self.weights: U64 = model.weights.reshape(-1, block_tokens, width)[block_positions]
        offsets = np.repeat((bases - firsts) * block_tokens, batch.counts)
        queries = offsets + batch.positions
        self.write_blocks: Index = self.blocks[queries // block_tokens]
        self.write_offsets: Index = batch.positions % block_tokens
        self._sum_ends: Index = (queries + 1) * width
        lows: Index = np.maximum(batch.positions - (window or batch.ends.max()) + 1, 0)
        self._sum_starts: Index = (offsets + lows) * width
        self._sums_length = len(self.blocks) * block_tokens * width + 1
        self.touched = sorted(set(self.write_blocks.tolist()))
        self.read = self.blocks.tolist()

    def run(self, view: U64, kv: U64) -> U64:
        """Write `kv` into the layer's pages and return its output per new position."""
        view[self.write_blocks, self.write_offsets] = kv
        words = view[self.blocks]
        words *= self.weights
        sums: U64 = np.empty(self._sums_length, dtype=np.uint64)  # per call: ranks may run at the same time
        sums[0] = 0
        np.cumsum(words.reshape(-1), out=sums[1:])
        output: U64 = sums[self._sum_ends]
        output -= sums[self._sum_starts]
        return output


class _RecurrentIndex:
    """State pages of one recurrent group, for all requests of a step."""

    def __init__(self, batch: ForwardBatch, g: int, group: ObjectGroup, model: FingerprintModel) -> None:
        block_tokens = group.block_tokens
        sources, targets = [], []
        for entry in batch.entries:
            ids = entry.request.tables[g].ids
            sources.append(ids[(entry.computed - 1) // block_tokens] if entry.computed else 0)
            targets.append(ids[(entry.computed + entry.scheduled - 1) // block_tokens])
        assert all(targets), "the running state needs a page"
        assert all(source or not entry.computed for source, entry in zip(sources, batch.entries, strict=True))
        self._sources: Index = np.asarray(sources, dtype=np.int64)
        self._fresh = np.flatnonzero(batch.starts == 0)
        self._targets: Index = np.asarray(targets, dtype=np.int64)
        self._firsts = batch.firsts
        self._lasts = batch.lasts
        self._counts = batch.counts
        steps = batch.positions - np.repeat(batch.starts, batch.counts)
        self._powers: U64 = model.powers[steps][:, None]
        self._inverses: U64 = model.inverse_powers[steps][:, None]
        self._factor = np.full(1, model.state_factor, dtype=np.uint64)
        self._weights = model.state_weights
        self.touched = targets
        self.read = [source for source in sources if source]

    def run(self, view: U64, kv: U64) -> U64:
        pages = view[:, 0]
        initial = pages[self._sources] * self._factor
        initial[self._fresh] = 0
        kv *= self._inverses
        sums: U64 = np.zeros((len(kv) + 1, kv.shape[1]), dtype=np.uint64)
        np.cumsum(kv, axis=0, out=sums[1:])
        initial -= sums[self._firsts]
        states: U64 = sums[1:] + np.repeat(initial, self._counts, axis=0)
        states *= self._powers
        pages[self._targets] = states[self._lasts]
        states *= self._weights
        output: U64 = states[:, 0].copy()
        for word in range(1, states.shape[1]):
            output += states[:, word]
        return output


class ForwardBatch:
    """Flat index arrays of one step's entries."""

    def __init__(self, entries: Sequence[StepEntry], layout: CacheLayout, model: FingerprintModel) -> None:
        assert entries
        self.entries = entries
        self.starts: Index = np.asarray([entry.computed for entry in entries], dtype=np.int64)
        self.counts: Index = np.asarray([entry.scheduled for entry in entries], dtype=np.int64)
        self.ends: Index = self.starts + self.counts
        assert self.counts.min() > 0
        after = np.cumsum(self.counts)
        self.firsts: Index = after - self.counts
        self.lasts: Index = after - 1
        self.positions: Index = np.arange(after[-1]) + np.repeat(self.starts - self.firsts, self.counts)
        self.tokens = np.concatenate(
            [entry.request.token_slice(entry.computed, entry.computed + entry.scheduled) for entry in entries]
        )
        self.groups: list[_AttentionIndex | _RecurrentIndex] = [
            (_RecurrentIndex if group.kind is GroupKind.RECURRENT else _AttentionIndex)(self, g, group, model)
            for g, group in enumerate(layout.groups)
        ]


class ForwardPass:
    """Runs one batch through the model, layer by layer."""

    def __init__(self, batch: ForwardBatch, model: FingerprintModel, memory: PagedMemory, probe: EngineProbe) -> None:
        self._batch = batch
        self._model = model
        self._memory = memory
        self._probe = probe
        self._x = model.embed(batch.tokens, batch.positions)
        self._partials: list[U64 | None] = [None] * model.ranks
        self._layers_done = 0

    def layer(self, layer: int, rank: int) -> None:
        """Rank's share of a layer: writes its pages and keeps its partial output."""
        assert layer == self._layers_done, "layers run in order"
        assert self._partials[rank] is None
        index = self._batch.groups[self._model.layers[layer].group]
        self._probe.attends(rank, layer, self._batch.entries)
        self._probe.forward_writes(rank, index.touched)
        self._probe.forward_reads(rank, index.read)
        kv = self._model.kv(layer, rank, self._x)
        self._partials[rank] = index.run(self._memory.layer_views[rank][layer], kv)

    def combine(self, layer: int) -> None:
        """Add up the ranks' partial outputs of `layer`; the next layer may then run."""
        assert layer == self._layers_done
        output = self._partials[0]
        assert output is not None
        for partial in self._partials[1:]:
            assert partial is not None, "every rank has finished the layer"
            output += partial
        self._x = self._model.combine(layer, self._x, output)
        self._partials = [None] * self._model.ranks
        self._layers_done += 1

    def run_all(self) -> None:
        for layer in self._model.layers:
            for rank in range(self._model.ranks):
                self.layer(layer.index, rank)
            self.combine(layer.index)

    def sample(self) -> dict[str, int]:
        """The next token of every entry that computed its last known token."""
        assert self._layers_done == len(self._model.layers)
        ending = [i for i, entry in enumerate(self._batch.entries) if entry.samples]
        if not ending:
            return {}
        tokens = self._model.next_tokens(self._x[self._batch.lasts[ending]])
        return {self._batch.entries[i].request.request_id: token for i, token in zip(ending, tokens, strict=True)}
