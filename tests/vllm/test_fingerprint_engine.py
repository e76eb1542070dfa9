"""The fingerprint model on vLLM's real engine: the simulation's tokens, one wrong slot is named, planted bugs too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import expand_rungs, failures
from kvcore.ladder.targets.vllm.climb import VllmStage
from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS, Ask, TinyEngine
from kvcore.ladder.targets.vllm.fingerprint import HEAD, dense_reference, fingerprints
from kvcore.ladder.targets.vllm.fingerprint_mutants import MUTANTS, failed_load
from kvcore.ladder.targets.vllm.fingerprint_witness import Witness
from kvcore.ladder.targets.vllm.models import POSITIONS_MAX, tiny_model, write_model
from kvcore.ladder.targets.vllm.mutants import MUTANTS as BLUNT
from kvcore.ladder.targets.vllm.watch import Reference
from kvcore.ladder.targets.vllm_scheduler.mutants import Spoil
from kvcore.sim.workload import Workload, load_workload

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]

HYBRID = tiny_model("fingerprint-window")
PROMPT = tuple(2 + 7 * position % 250 for position in range(110))
OUTPUT_TOKENS = 6
REQUESTS = 12
OPTIONS = LadderOptions(target="vllm", requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)


# ---------------------------------------------------------------- one wrong slot


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    model = write_model(HYBRID, tmp_path_factory.mktemp("model"))
    engine = TinyEngine(model, num_blocks=40, positions=384)
    yield engine
    engine.close()


@dataclass
class Flip:
    """After the prefill, one bit of one float of a slot is another one. `found`: its slot number."""

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


# ---------------------------------------------------------------- the ladder


@lru_cache(maxsize=1)
def workload() -> Workload:
    return load_workload(None, 0, requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)


@lru_cache(maxsize=2)
def reference(model: str, cell: str) -> Reference:
    """Rungs 0 and 1, for everybody here."""
    stage = VllmStage(MatrixCell.parse(cell), replace(OPTIONS, model=model), workload())
    results = stage.climb(("0", "1"))
    assert [result.verdict for result in results] == ["pass", "pass"]
    return stage.reference


def climb(model: str, cell: str, passes: Sequence[str], spoil: Spoil) -> list[tuple[str, str]]:
    """(rung, problem)"""
    stage = VllmStage(
        MatrixCell.parse(cell),
        replace(OPTIONS, model=model),
        workload(),
        prefix_caches=(False,),
        spoil=spoil,
        reference=reference(model, cell),
    )
    return [(result.rung, problem) for result in stage.climb(passes) for problem in result.problems]


@pytest.mark.parametrize(
    ("model", "cell"), [("fingerprint", "full/r1/inproc/async"), ("fingerprint-window", "full+window/r1/inproc/async")]
)
def test_the_rungs_are_green(model: str, cell: str) -> None:
    cells = (MatrixCell.parse(cell),)
    result = climb_all(replace(OPTIONS, model=model, cells=cells, passes=expand_rungs(range(5))))
    assert not failures(result.cells), failures(result.cells)
    (climbed,) = result.cells
    verified = re.search(r"(\d+) slots verified", climbed.workload)
    assert verified is not None
    assert int(verified[1]) > 1_000_000
    assert "KV 0.0e+00" in climbed.workload, "whole numbers do not differ by rounding"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_named_where_it_is_first_read(mutant: str) -> None:
    problems = climb("fingerprint-window", "full+window/r1/inproc/async", ("0", "2", "3"), MUTANTS[mutant])
    named = [text for _, text in problems if text.startswith("[slot]")]
    assert named, problems
    assert {rung for rung, _ in problems} == {"3"}
    if mutant == "one-block-shifted":
        place = re.search(r"layer (\d+), group \d+: position (\d+) ", named[0])
        assert place is not None
        last = int(place[2]) + BLOCK_TOKENS - 1
        assert f"which belongs to layer {place[1]}, position {last} of " in named[0]
        assert f"{BLOCK_TOKENS} wrong slots" in named[0]
    if mutant == "one-float-flipped":
        assert "1 of 64 floats are other ones; 1 wrong slots" in named[0]


def test_what_was_stored_from_stale_block_ids_is_named_where_it_is_read_back() -> None:
    spoil = BLUNT["stale-blocks"]
    problems = climb("fingerprint", "full/r1/inproc/async", ("0", "2", "4", "replay"), spoil)
    assert any(text.startswith("[slot]") for _, text in problems), problems


@pytest.mark.parametrize("told", [True, False])
def test_a_failed_load_is_a_finding_only_when_nobody_says_so(told: bool) -> None:
    problems = climb("fingerprint", "full/r1/inproc/sync", ("0", "2", "3"), failed_load(told=told))
    wrong = [text for _, text in problems if text.startswith(("[slot]", "[bytes]", "[output]"))]
    assert bool(wrong) is not told, problems
