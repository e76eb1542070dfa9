"""`EngineOracle`: watches the engine's pages through its probe.

* Blocks: whatever writes a page (forward pass, zeroing, local copy) must not meet a copy that still reads it and could
be
  published, nor one that still writes it.
* Bytes: when an admitted request first attends to KV it did not compute in this admission - found locally or loaded -
every
  visible word is compared with the dense reference, layer by layer. Loaded cells that are right count as verified
  loads. What is wrong is a finding unless the same step reports the load as failed: the engine then throws away what
  was computed on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcore.groups import CacheLayout, GroupKind
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.engine.probe import NullProbe
from kvcore.sim.engine.request import Request
from kvcore.sim.engine.step import StepEntry
from kvcore.sim.marks.engine import EngineMarks
from kvcore.sim.model import FingerprintModel, Layer
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth


class CopyWatch(Protocol):
    """What a device tells about its unfinished copies: a block that must not be written now, if there is one."""

    def overwritten(self, blocks: Collection[int]) -> int | None: ...

    def torn(self, blocks: Collection[int]) -> int | None: ...

    def given_away(self, block: int) -> None:
        """The block has a new owner, while copies of the old one may still touch it."""
        ...


class EngineOracle(NullProbe):
    """One per engine. `tokens_loaded` and `preemptions_store_inflight` are for the rung table."""

    def __init__(
        self,
        layout: CacheLayout,
        model: FingerprintModel,
        memory: PagedMemory,
        truth: Truth,
        findings: Findings,
        devices: Sequence[CopyWatch],
        stores_inflight: Callable[[str], int],
    ) -> None:
        self._layout = layout
        self._model = model
        self._memory = memory
        self._truth = truth
        self._findings = findings
        self._devices = devices
        self._stores_inflight = stores_inflight
        self._admitted: dict[str, tuple[int, int]] = {}  # request -> (local, external) of an unchecked admission
        self._right: dict[str, bool] = {}
        self._wrong: dict[str, list[str]] = {}  # findings that a failed load would still explain
        self.preemptions_store_inflight = 0
        self.tokens_of: Callable[[str], int] = lambda request_id: 0  # set by whoever knows the scheduler
        self._marks = EngineMarks(findings.sometimes, layout, findings.now_ns, stores_inflight, self._admitted)

    def engine_restarted(self) -> None:
        """The engine has crashed and begins anew: what was under way has no outcome."""
        self._admitted.clear()
        self._right.clear()
        self._wrong.clear()
        self._findings.tokens_taken = self._findings.loads_short = 0
        self._marks.engine_restarted()

    # ---- blocks

    def block_allocated(self, block: int, request_id: str) -> None:
        for device in self._devices:
            device.given_away(block)

    def forward_writes(self, rank: int, blocks: Sequence[int]) -> None:
        self._check_free(rank, blocks, "the forward pass")

    def poisoned(self, rank: int, blocks: Sequence[int]) -> None:
        self._check_free(rank, blocks, "zeroing")

    def _check_free(self, rank: int, blocks: Sequence[int], writer: str) -> None:
        named = [int(block) for block in blocks]
        lost = self._devices[rank].overwritten(named)
        if lost is not None:
            self._report("blocks", f"{writer} on rank {rank} writes block {lost}, which a store still reads")
        torn = self._devices[rank].torn(named)
        if torn is not None:
            self._report("blocks", f"{writer} on rank {rank} writes block {torn}, which a load still writes")

    # ---- what is attended to

    def asked(self, request_id: str, local_tokens: int, answer: int | None) -> None:
        self._marks.asked(request_id, answer)

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None:
        self._convict(request_id)
        if local_tokens or external_tokens:
            self._admitted[request_id] = (local_tokens, external_tokens)
        self._findings.tokens_taken += external_tokens
        self._marks.admitted(request_id, local_tokens, external_tokens, self.tokens_of(request_id))

    def load_ended(self, request_id: str, valid_tokens: int, promised_tokens: int) -> None:
        self._marks.load_ended(request_id, valid_tokens, promised_tokens)
        if valid_tokens < promised_tokens:
            self._findings.loads_short += 1
            self._admitted.pop(request_id, None)  # what it attends to from now on was computed here
            self._wrong.pop(request_id, None)
            self._right.pop(request_id, None)

    def _convict(self, request_id: str) -> None:
        """No report of a failed load has come, or can come any more."""
        for text in self._wrong.pop(request_id, ()):
            self._report("bytes", text)

    def preempted(self, request_id: str) -> None:
        self._marks.preempted(request_id)
        self._convict(request_id)
        self._admitted.pop(request_id, None)
        self.preemptions_store_inflight += self._stores_inflight(request_id) > 0

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        self._marks.finished(request_id)
        self._convict(request_id)

    def request_aborted(self, request_id: str) -> None:
        self._marks.aborted(request_id)
        self._convict(request_id)
        self._admitted.pop(request_id, None)

    def attends(self, rank: int, layer: int, entries: Sequence[StepEntry]) -> None:
        for entry in entries:
            if entry.request.request_id in self._admitted:
                self._check_context(rank, self._model.layers[layer], entry)

    def _check_context(self, rank: int, layer: Layer, entry: StepEntry) -> None:
        request_id = entry.request.request_id
        right = self._context_is_right(rank, layer, entry.request, entry.computed)
        if not right:
            text = f"{request_id} attends to wrong KV in layer {layer.index} on rank {rank}"
            self._wrong.setdefault(request_id, []).append(text)
        self._right[request_id] = right and self._right.get(request_id, True)
        if layer.index == len(self._model.layers) - 1 and rank == self._layout.ranks - 1:
            local, external = self._admitted.pop(request_id)
            if self._right.pop(request_id):
                self._findings.loads_verified += self._cells_loaded(entry.request, local, local + external)

    def _context_is_right(self, rank: int, layer: Layer, request: Request, computed: int) -> bool:
        spec = self._layout.groups[layer.group]
        table = np.asarray(request.tables[layer.group].ids, dtype=np.int64)
        pages = self._memory.layer_views[rank][layer.index]
        words = self._truth.layer_words(request.request_id, layer, rank)
        if spec.kind is GroupKind.RECURRENT:
            page = table[(computed - 1) // spec.block_tokens]
            return bool(page) and np.array_equal(pages[page, 0], words[computed - 1])
        first = max(0, computed - layer.window_tokens + 1) if spec.kind is GroupKind.WINDOW else 0
        positions: npt.NDArray[np.int64] = np.arange(first, computed)
        blocks = table[positions // spec.block_tokens]
        return bool(blocks.all()) and np.array_equal(
            pages[blocks, positions % spec.block_tokens], words[first:computed]
        )

    def _cells_loaded(self, request: Request, start: int, end: int) -> int:
        """Cells of all rows with a real block between the two tokens."""
        if end == start:
            return 0
        chunk = self._layout.chunk_tokens
        cells = 0
        for group, spec in enumerate(self._layout.groups):
            ids = request.tables[group].ids
            for index in range(start // chunk, -(-end // chunk)):
                blocks = ids[index * chunk // spec.block_tokens : (index + 1) * chunk // spec.block_tokens]
                cells += any(blocks)
        return cells * self._layout.ranks

    def _report(self, oracle: str, text: str) -> None:
        self._findings.report(oracle, text)
