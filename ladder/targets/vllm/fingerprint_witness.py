"""The witness: what every visible slot of a fingerprint model must hold, and the name of each one that does not.

Theory of operation
-------------------
At every layer of every step the model shows what it has read (`Witness.look`). The witness asks the model runner for
the requests of the batch and their tokens, asks the simulation's dense oracle (`kvcore.sim.reference`) which words
these tokens give, and compares all floats of all visible slots with them, bit by bit: loaded, kept from earlier steps,
and just written.

A wrong slot makes wrong states, which are written into the slots of the new tokens by the layers behind it. So only
the first wrong slot of a request and step is named, in the order in which layers read, and each one once.

When a synchronous load has failed and the connector says so, the step runs on garbage, its output is dropped and it is
computed again: what was seen of the requests that hold such a block is dropped, too. Everything else is a finding.

The runner is reached through the engine object, so there is a witness only where the engine runs in this process (as
the ladder has it). Elsewhere the model reads, sums and generates just the same, and tokens alone tell.

Who holds: the impls of the layers a witness from `__enter__` to `__exit__`; the witness nothing of the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS, TinyEngine
from kvcore.ladder.targets.vllm.fingerprint import Bits, dense_reference, from_bits, to_bits
from kvcore.ladder.targets.vllm.fingerprint_pages import ROW, Visible
from kvcore.sim.model import FingerprintModel

FINDINGS_MAX = 20
_ERRORS_HOOK = "get_block_ids_with_load_errors"


class Truths:
    """What the slots of each request hold, for its longest known sequence. Layers by index: [positions, ROW]."""

    def __init__(self, model: FingerprintModel) -> None:
        self._model = model
        self._reference = dense_reference(model, BLOCK_TOKENS, sequences_max=1)
        self._known: dict[str, tuple[npt.NDArray[np.uint32], list[Bits]]] = {}

    def slots(self, request_id: str, tokens: npt.NDArray[np.int32], layer: int) -> Bits:
        """Of the positions of `tokens`."""
        wanted = tokens.astype(np.uint32)
        known = self._known.get(request_id)
        if known is None or not np.array_equal(known[0][: len(wanted)], wanted):
            layers = [to_bits(self._reference.layer_words(wanted, layer, 0)) for layer in self._model.layers]
            known = self._known[request_id] = (wanted, layers)
        return known[1][layer][: len(wanted)]

    def whose(self, slot: Bits) -> str:
        """Where the content of this slot belongs; empty if nowhere."""
        for request_id, (_, layers) in self._known.items():
            for layer, slots in enumerate(layers):
                found = np.flatnonzero((slots == slot).all(axis=1))
                if len(found):
                    return f"layer {layer}, position {found[0]} of {request_id}"
        return ""


@dataclass(frozen=True, slots=True)
class WrongSlot:
    """`place`: (request, layer, group, position, slot); `held`: the blocks in which its request reads."""

    place: tuple[str, int, int, int, int]
    wrong_slots: int
    expected: int
    found: int
    differs: str
    held: frozenset[int]

    def __str__(self) -> str:
        request_id, layer, group, position, slot = self.place
        return (
            f"[slot] {request_id}, layer {layer}, group {group}: position {position} is in slot {slot} "
            f"(block {slot // BLOCK_TOKENS}), which must hold {self.expected:016x} and holds {self.found:016x}, "
            f"{self.differs}; {self.wrong_slots} wrong slots in this layer"
        )


@dataclass(slots=True)
class Witness:
    """For the time of a pass. `slots_checked` counts (position, layer) pairs.

    Of an engine with another model it sees nothing, and says nothing.
    """

    engine: TinyEngine
    findings: list[str] = field(default_factory=list)
    slots_checked: int = 0
    _impls: list[Any] = field(default_factory=list)
    _groups: list[int] = field(default_factory=list)  # of each layer
    _truths: Any = None
    _batch: Any = None
    _step: dict[str, WrongSlot] = field(default_factory=dict)  # of each request, not yet judged
    _named: dict[tuple[str, int, int, int, int], None] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = self.engine.runner
        model = getattr(runner.model, "fingerprints", None)
        if model is None:
            return
        layers = runner.model.layers
        self._impls = [layer.impl for layer in layers]
        names = [group.layer_names for group in self.engine.scheduler.kv_cache_config.kv_cache_groups]
        self._groups = [next(g for g, group in enumerate(names) if layer.layer_name in group) for layer in layers]
        self._truths, self._batch = Truths(model), runner.input_batch

    def __enter__(self) -> Witness:
        for impl in self._impls:
            impl.witness = self
        connector = self.engine.worker_connector if self._impls and self.engine.connector is not None else None
        if connector is not None:
            self._listen(connector)
        return self

    def __exit__(self, *exception: object) -> None:
        for impl in self._impls:
            impl.witness = None
        while self._undo:
            self._undo.pop()()
        self._judge(frozenset())
        if self._impls and not self.slots_checked and exception[0] is None:
            self.findings.append("[slot] no slot was looked at")

    def _listen(self, connector: Any) -> None:
        """Asked by the runner once in each step, after the forward pass."""
        errors = getattr(connector, _ERRORS_HOOK)

        def listen() -> Any:
            invalid = errors()
            self._judge(frozenset(invalid or ()))
            return invalid

        setattr(connector, _ERRORS_HOOK, listen)
        self._undo.append(lambda: connector.__dict__.pop(_ERRORS_HOOK))

    # ------------------------------------------------------------------ in a step

    def look(self, layer: int, visible: Visible, slots: Bits) -> None:
        """`slots`: [blocks, tokens, ROW], as layer `layer` has read them."""
        rows = slots.reshape(-1, ROW)
        for request, end in enumerate(visible.ends.tolist()):
            request_id = self._batch.req_ids[request]
            expected = self._truths.slots(request_id, self._batch.token_ids_cpu[request, :end], layer)
            where = visible.rows(request)
            found, expected = rows[where], expected[int(visible.lows[request]) :]
            self.slots_checked += len(found)
            if request_id not in self._step and not np.array_equal(found, expected):
                self._step[request_id] = self._wrong(request_id, layer, visible, request, found, expected)

    def _wrong(
        self, request_id: str, layer: int, visible: Visible, request: int, found: Bits, expected: Bits
    ) -> WrongSlot:
        differs = (found != expected).sum(axis=1)
        first = int(np.flatnonzero(differs)[0])
        row = visible.rows(request).start + first
        place = int(visible.lows[request]) + first
        slot = visible.block(row) * BLOCK_TOKENS + place % BLOCK_TOKENS
        words = [from_bits(slots[first : first + 1])[0] for slots in (expected, found)]
        word = int(np.flatnonzero(found[first] != expected[first])[0]) // (ROW // len(words[0]))
        whose = self._truths.whose(found[first])
        return WrongSlot(
            (request_id, layer, self._groups[layer], place, slot),
            int((differs > 0).sum()),
            int(words[0][word]),
            int(words[1][word]),
            f"which belongs to {whose}" if whose else f"{differs[first]} of {ROW} floats are other ones",
            frozenset(map(int, visible.held(request))),
        )

    def _judge(self, invalid: frozenset[int]) -> None:
        """The step is over, and these blocks were not loaded."""
        for wrong in self._step.values():
            if wrong.place not in self._named and not wrong.held & invalid and len(self.findings) < FINDINGS_MAX:
                self._named[wrong.place] = None
                self.findings.append(str(wrong))
        self._step.clear()
