"""The fingerprint model on vLLM's real engine: the simulation's tokens, and one wrong slot is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS, Ask, TinyEngine
from kvcore.ladder.targets.vllm.fingerprint import HEAD, dense_reference, fingerprints
from kvcore.ladder.targets.vllm.fingerprint_witness import Witness
from kvcore.ladder.targets.vllm.models import POSITIONS_MAX, tiny_model, write_model

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]

HYBRID = tiny_model("fingerprint-window")
PROMPT = tuple(2 + 7 * position % 250 for position in range(110))
OUTPUT_TOKENS = 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    model = write_model(HYBRID, tmp_path_factory.mktemp("model"))
    engine = TinyEngine(model, num_blocks=40, positions=384)
    yield engine
    engine.close()


@dataclass
class Flip:
    """After the prefill, one bit of one float of a slot is another one. `slot`: which, once it has happened."""

    engine: TinyEngine
    layer: int
    position: int
    half: int = 1  # of a block: K, V
    slot: int = -1

    def __call__(self) -> None:
        if self.slot >= 0:
            return
        name = f"model.layers.{self.layer}.attn"
        groups = self.engine.scheduler.kv_cache_config.kv_cache_groups
        group, slots = next((g, each.layer_names) for g, each in enumerate(groups) if name in each.layer_names)
        (request,) = self.engine.scheduler.running
        index, offset = divmod(self.position, BLOCK_TOKENS)
        block = self.engine.table(request.request_id)[group][index]
        page = self.engine.pages()[group][slots.index(name)][block]
        halves = page.view(2, BLOCK_TOKENS * HEAD)
        rows = halves[0].view(HEAD, BLOCK_TOKENS).T if self.half == 0 else halves[1].view(BLOCK_TOKENS, HEAD)
        rows[offset].view(torch.int32)[HEAD - 1] ^= 1
        self.slot = block * BLOCK_TOKENS + offset


def served(engine: TinyEngine, between: Callable[[], None] | None = None) -> tuple[tuple[int, ...], list[str]]:
    with Witness(engine) as witness:
        answers = engine.serve([Ask("r0", PROMPT, OUTPUT_TOKENS)], between)
    assert witness.slots_checked > len(PROMPT)
    return answers["r0"].tokens, witness.findings


def right_tokens(count: int = OUTPUT_TOKENS) -> tuple[int, ...]:
    model = fingerprints(HYBRID.windows, 1, POSITIONS_MAX)
    return tuple(dense_reference(model, BLOCK_TOKENS).tokens(PROMPT, count))


def test_the_engines_tokens_are_the_simulations(engine: TinyEngine) -> None:
    assert served(engine) == (right_tokens(), [])


@pytest.mark.parametrize("half", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize(("layer", "group", "position"), [(0, 0, 0), (0, 0, 109), (2, 0, 31), (1, 1, 50), (3, 1, 109)])
def test_one_flipped_bit_is_named_in_the_next_step_and_changes_the_next_token(
    engine: TinyEngine, layer: int, group: int, position: int, half: int
) -> None:
    flip = Flip(engine, layer, position, half)
    tokens, findings = served(engine, flip)
    assert findings, "nothing was found"
    assert findings[0].startswith(
        f"[slot] r0, layer {layer}, group {group}: position {position} is in slot {flip.slot} "
        f"(block {flip.slot // BLOCK_TOKENS}), which must hold "
    )
    assert "1 of 64 floats are other ones; 1 wrong slots in this layer" in findings[0]
    assert tokens[:1] == right_tokens(1)
    assert tokens[1] != right_tokens()[1]


def test_a_slot_that_has_left_the_window_is_nobodys_affair(engine: TinyEngine) -> None:
    """110 positions were computed, the window is 64: the next token sees positions from 47 on, in this layer."""
    assert served(engine, Flip(engine, layer=1, position=46)) == (right_tokens(), [])
    assert served(engine, Flip(engine, layer=1, position=47))[1]


def test_without_a_witness_tokens_tell_alone(engine: TinyEngine) -> None:
    answers = engine.serve([Ask("r0", PROMPT, OUTPUT_TOKENS)], Flip(engine, layer=3, position=100))
    assert answers["r0"].tokens[1:] != right_tokens()[1:]
