"""The torch model is exact: a token's KV is one value, whatever the batch, the chunking or the number of ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="the torch target needs torch: make test installs it")

from kvcore.errors import ConfigError  # noqa: E402
from kvcore.groups import CacheLayout, GroupKind  # noqa: E402
from kvcore.ladder.targets.torch.dense import DenseReference  # noqa: E402
from kvcore.ladder.targets.torch.model import VOCABULARY, TorchModel, build_torch_model, wrap  # noqa: E402
from kvcore.ladder.targets.torch.pages import Entry, TorchForward, TorchPages  # noqa: E402

KIND = "full+window+recurrent"
PROMPT_TOKENS = 150
BLOCK = 16  # a recurrent state is kept at the ends of these


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def draw_prompt(draw: random.Random, tokens: int = PROMPT_TOKENS) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


class Ranks:
    """All ranks of one model in this process: each step runs them side by side and adds up their outputs."""

    def __init__(self, ranks: int, seed: int = 3) -> None:
        self.layout, self.model = build_torch_model(KIND, ranks, chunk_tokens=BLOCK, seed=seed)
        self.pages = [TorchPages(self.layout, self.model, 512) for _ in range(ranks)]
        self._barrier = threading.Barrier(ranks)
        self._partials: list[object] = [None] * ranks

    def step(self, entries: list[Entry]) -> dict[str, int]:
        sampled: list[dict[str, int]] = [{} for _ in self.pages]

        def run(rank: int) -> None:
            forward = TorchForward(entries, self.layout, self.model, self.pages[rank], rank, self._reduce(rank))
            for layer in range(len(self.model.layers)):
                forward.layer(layer)
            sampled[rank] = forward.sample()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.pages))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(each == sampled[0] for each in sampled), "every rank samples the same"
        return sampled[0]

    def _reduce(self, rank: int) -> Callable[[object], None]:
        def reduce(output: object) -> None:
            self._partials[rank] = output.clone()  # type: ignore[attr-defined]
            self._barrier.wait()
            total = sum(self._partials)  # type: ignore[arg-type]
            self._barrier.wait()
            output.copy_(total)  # type: ignore[attr-defined]

        return reduce


def tables(layout: CacheLayout, request: int) -> tuple[tuple[int, ...], ...]:
    """Blocks of their own for each request and group."""
    first = 1 + 60 * request
    return tuple(tuple(range(first + 20 * g, first + 20 * g + 20)) for g in range(len(layout.groups)))


def chunking(draw: random.Random, tokens: int) -> list[int]:
    """Ends of prefill steps. Those before the last lie at ends of recurrent blocks, as a scheduler makes them."""
    ends = sorted({draw.randrange(1, tokens // BLOCK + 1) * BLOCK for _ in range(draw.randrange(1, 6))})
    return [end for end in ends if end < tokens] + [tokens]


def same_pages(ranks: Ranks, reference: DenseReference, prompt: list[int], table: tuple[tuple[int, ...], ...]) -> bool:
    """All that the layers have written for the prompt, byte for byte."""
    for rank, pages in enumerate(ranks.pages):
        for layer in ranks.model.layers:
            expected = reference.written(prompt, layer.index, rank)
            blocks, size = table[layer.group], ranks.layout.groups[layer.group].block_tokens
            if layer.kind is GroupKind.RECURRENT:
                found, right = pages.layer(layer)[blocks[(len(prompt) - 1) // size], 0], expected[-1]
            else:
                used = list(blocks[: -(-len(prompt) // size)])
                found, right = pages.layer(layer)[used].reshape(-1, expected.shape[1])[: len(prompt)], expected
            if not torch.equal(found, right):
                return False
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_bytes_and_tokens_are_the_same_over_twenty_random_chunkings(ranks: int) -> None:
    draw = random.Random(5)
    world = Ranks(ranks)
    reference = DenseReference(world.model)
    prompt = draw_prompt(draw)
    expected = reference.tokens(prompt, 1)[0]
    table = tables(world.layout, 0)
    for _ in range(20):
        for pages in world.pages:
            pages.poison(range(pages.num_blocks))
        start, sampled = 0, {}
        for end in chunking(draw, len(prompt)):
            sampled = world.step([Entry("q", start, tuple(prompt[start:end]), table, end == len(prompt))])
            start = end
        assert sampled == {"q": expected}
        assert same_pages(world, reference, prompt, table)


def test_kv_bytes_do_not_depend_on_who_else_is_in_the_batch() -> None:
    draw = random.Random(6)
    world = Ranks(1)
    reference = DenseReference(world.model)
    prompts = [draw_prompt(draw, draw.randrange(20, 140)) for _ in range(6)]
    entries = [
        Entry(f"q{number}", 0, tuple(prompt), tables(world.layout, number), True)
        for number, prompt in enumerate(prompts)
    ]
    sampled = world.step(entries)
    assert sampled == {f"q{number}": reference.tokens(prompt, 1)[0] for number, prompt in enumerate(prompts)}
    assert all(same_pages(world, reference, prompt, tables(world.layout, n)) for n, prompt in enumerate(prompts))


def test_decoding_one_token_at_a_time_writes_the_same_as_prefill() -> None:
    draw = random.Random(7)
    world = Ranks(2)
    reference = DenseReference(world.model)
    prompt, table = draw_prompt(draw, 48), tables(world.layout, 0)
    world.step([Entry("q", 0, tuple(prompt), table, True)])
    sequence = prompt + reference.tokens(prompt, 20)
    for position in range(len(prompt), len(sequence)):
        sampled = world.step([Entry("q", position, (sequence[position],), table, True)])
        if position + 1 < len(sequence):
            assert sampled == {"q": sequence[position + 1]}
    assert same_pages(world, reference, sequence, table)


def test_the_model_is_the_same_for_any_number_of_ranks() -> None:
    prompt = draw_prompt(random.Random(8))
    answers = [DenseReference(TorchModel(KIND, ranks, seed=9)).tokens(prompt, 8) for ranks in (1, 2)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 2, "a model that repeats itself proves little"


def test_one_wrong_float_in_a_visible_position_is_seen() -> None:
    """The comparison of bytes can fail: one element of one layer of one rank, off by one."""
    draw = random.Random(10)
    world = Ranks(2)
    reference = DenseReference(world.model)
    prompt, table = draw_prompt(draw), tables(world.layout, 0)
    world.step([Entry("q", 0, tuple(prompt), table, True)])
    assert same_pages(world, reference, prompt, table)
    world.pages[1].layer(world.model.layers[0])[table[0][3], 5, 2] += 1
    assert not same_pages(world, reference, prompt, table)


def test_what_nobody_has_written_poisons_every_result_that_reads_it() -> None:
    world = Ranks(1)
    prompt = draw_prompt(random.Random(11), 40)
    table = tables(world.layout, 0)
    world.step([Entry("q", 0, tuple(prompt[:32]), table, False)])
    world.pages[0].poison([table[0][1]])
    world.step([Entry("q", 32, tuple(prompt[32:]), table, True)])
    second = world.pages[0].layer(world.model.layers[3])[table[0][4], : len(prompt) - 32]
    assert torch.isnan(second).any(), "a layer behind the poisoned one must show it"


def test_wrap_is_exact_and_keeps_its_range() -> None:
    values = torch.arange(-100_000, 100_000, dtype=torch.float32)
    wrapped = wrap(values)
    assert float(wrapped.min()) == -15
    assert float(wrapped.max()) == 15
    assert torch.equal(torch.remainder(values - wrapped, 31), torch.zeros_like(values))


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 KV heads cannot be shared by 3 ranks"):
        TorchModel("full", 3, 1)
    with pytest.raises(ConfigError, match="unknown model"):
        TorchModel("fulll", 1, 1)
