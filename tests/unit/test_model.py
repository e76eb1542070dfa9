"""The fingerprint model: every visible word counts, and how work is cut into steps does not."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.errors import CallerError, ConfigError
from kvcore.groups import GroupKind
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.engine.probe import NullProbe
from kvcore.sim.engine.request import Request, RequestSpec
from kvcore.sim.engine.step import ForwardBatch, ForwardPass, StepEntry
from kvcore.sim.model import MODEL_KINDS, build_model
from kvcore.sim.reference import Reference

KINDS = tuple(MODEL_KINDS)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 1 << 30, length))


class Bench:
    """Requests with all their blocks, stepped by hand."""

    def __init__(self, kind: str, ranks: int = 1) -> None:
        self.layout, self.model = build_model(kind, ranks)
        self.memory = PagedMemory(self.layout, self.model, 2_000)
        self._next_block = 1

    def request(self, name: str, prompt: tuple[int, ...], output_tokens: int = 12) -> Request:
        request = Request(RequestSpec(name, prompt, output_tokens), 0, len(self.layout.groups))
        for group, table in zip(self.layout.groups, request.tables, strict=True):
            count = -(-(len(prompt) + output_tokens) // group.block_tokens)
            table.extend(range(self._next_block, self._next_block + count))
            self._next_block += count
        return request

    def step(self, *shares: tuple[Request, int]) -> list[int]:
        """Run (request, tokens) shares in one batch; append and return the tokens of those that reached their end."""
        entries = [StepEntry(request, request.computed, tokens, (), False) for request, tokens in shares]
        forward = ForwardPass(ForwardBatch(entries, self.layout, self.model), self.model, self.memory, NullProbe())
        forward.run_all()
        sampled = forward.sample()
        for request, tokens in shares:
            request.computed += tokens
            if request.request_id in sampled:
                request.append(sampled[request.request_id])
        return list(sampled.values())

    def pages_of(self, request: Request) -> list[bytes]:
        return [
            groups[g][table.ids].tobytes() for groups in self.memory.groups for g, table in enumerate(request.tables)
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_prefill_and_its_decodes_give_the_references_tokens(kind: str, ranks: int) -> None:
    bench = Bench(kind, ranks)
    request = bench.request("a", prompt_of(150), output_tokens=10)
    bench.step((request, 150))
    while not request.complete:
        bench.step((request, 1))
    assert request.generated == Reference(bench.model, bench.layout).tokens(prompt_of(150), 10)


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_random_chunkings_and_batchings_change_no_token_and_no_byte(kind: str) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 16, 77, 130))]
    reference_bench = Bench(kind, 2)
    expected = []
    for index, prompt in enumerate(prompts):
        request = reference_bench.request(f"r{index}", prompt)
        reference_bench.step((request, len(prompt)))
        expected.append((request.generated, reference_bench.pages_of(request)))
    for seed in range(20):
        draws = np.random.default_rng(seed)
        bench = Bench(kind, 2)
        requests = [bench.request(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
        while pending := [request for request in requests if not request.generated]:
            chosen = [request for request in pending if draws.random() < 0.7] or pending[:1]
            bench.step(
                *((request, int(draws.integers(1, request.length - request.computed + 1))) for request in chosen)
            )
        for request, (tokens, pages) in zip(requests, expected, strict=True):
            assert request.generated == tokens
            if "recurrent" not in kind:  # state pages also hold what the last step ended with: chunking shows there
                assert bench.pages_of(request) == pages


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_writes_the_bytes_that_a_prefill_of_the_same_tokens_writes(kind: str) -> None:
    bench = Bench(kind)
    decoded = bench.request("decoded", prompt_of(64), output_tokens=8)
    bench.step((decoded, 64))
    while not decoded.complete:
        bench.step((decoded, 1))
    prefilled = bench.request("prefilled", tuple(decoded.tokens[:-1]), output_tokens=1)
    assert bench.step((prefilled, 64)) == []
    bench.step((prefilled, prefilled.length - 64))
    assert prefilled.tokens == decoded.tokens
    assert bench.pages_of(prefilled) == bench.pages_of(decoded)


def visible_words(bench: Bench, request: Request) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Every word that the token after `computed` may see, as (array, index)."""
    words = []
    for rank in range(bench.layout.ranks):
        for g, (group, table) in enumerate(zip(bench.layout.groups, request.tables, strict=True)):
            pages = bench.memory.groups[rank][g]
            if group.kind is GroupKind.RECURRENT:
                places = [(table.ids[(request.computed - 1) // group.block_tokens], 0)]
            else:
                first = 0 if group.window_tokens is None else max(0, request.computed - group.window_tokens + 1)
                places = [
                    (table.ids[position // group.block_tokens], position % group.block_tokens)
                    for position in range(first, request.computed)
                ]
            words += [
                (pages, (block, layer, offset, word))
                for block, offset in places
                for layer in range(pages.shape[1])
                for word in range(bench.model.width)
            ]
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_bit_in_any_visible_word_changes_the_next_token(kind: str) -> None:
    bench = Bench(kind, 2)
    request = bench.request("a", prompt_of(101), output_tokens=3)
    bench.step((request, 100))
    request.computed = 100
    before = bench.memory.buffers[0].copy(), bench.memory.buffers[1].copy()
    (token,) = bench.step((request, 1))
    draws = np.random.default_rng(7)
    words = visible_words(bench, _rewound(request))
    changed = 0
    for _ in range(1_000):
        for rank in (0, 1):
            bench.memory.buffers[rank][:] = before[rank]
        pages, place = words[int(draws.integers(len(words)))]
        pages[place] ^= np.uint64(1) << np.uint64(draws.integers(64))
        (other,) = bench.step((_rewound(request), 1))
        changed += other != token
    assert changed >= 999


def _rewound(request: Request) -> Request:
    """Back to the prompt's last token."""
    del request.tokens[len(request.spec.prompt) :]
    request.computed = len(request.spec.prompt) - 1
    return request


def test_a_word_outside_the_window_changes_nothing() -> None:
    bench = Bench("full+window")
    request = bench.request("a", prompt_of(101), output_tokens=3)
    bench.step((request, 100))
    (token,) = bench.step((request, 1))
    window = bench.layout.groups[1]
    assert window.kind is GroupKind.WINDOW
    bench.memory.groups[0][1][request.tables[1].ids[5]] = 0  # tokens 20..23, the window begins at 61
    assert bench.step((_rewound(request), 1)) == [token]


def test_a_null_block_in_sight_stops_the_step() -> None:
    bench = Bench("full")
    request = bench.request("a", prompt_of(40))
    bench.step((request, 20))
    request.tables[0].set_null(2)
    with pytest.raises(AssertionError, match="null block"):
        bench.step((request, 20))


def test_all_groups_alias_the_same_block_memory() -> None:
    bench = Bench("full+window+recurrent")
    full, window, recurrent = bench.memory.groups[0]
    full[9] = 1
    window[9, 0, 0, 0] = 2
    assert full[9].reshape(-1)[0] == 2
    recurrent[9, 0, 0, 0] = 3
    assert full[9].reshape(-1)[0] == window[9].reshape(-1)[0] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_cells_are_what_the_paged_engine_holds(kind: str) -> None:
    bench = Bench(kind, 2)
    reference = Reference(bench.model, bench.layout)
    prompt = prompt_of(96)
    request = bench.request("a", prompt)
    for _ in range(6):
        bench.step((request, 16))
    for rank in range(2):
        for g, group in enumerate(bench.layout.groups):
            for chunk in range(6):
                blocks = bench.layout.blocks_per_chunk(g)
                ids = request.tables[g].ids[chunk * blocks : (chunk + 1) * blocks]
                cell = reference.cell_bytes(prompt, g, rank, chunk)
                assert len(cell) == bench.layout.cell_bytes(g)
                assert cell == bench.memory.groups[rank][g][ids].tobytes(), (rank, group, chunk)


def test_cells_differ_by_rank_group_chunk_and_prefix() -> None:
    layout, model = build_model("full+window", 2)
    reference = Reference(model, layout)
    one, other = prompt_of(64, 1), prompt_of(16, 2) + prompt_of(64, 1)[16:]
    cells = [
        reference.cell_bytes(tokens, g, rank, chunk)
        for tokens in (one, other)
        for g in range(2)
        for rank in range(2)
        for chunk in range(4)
    ]
    assert len(set(cells)) == len(cells)


def test_a_cell_beyond_the_sequence_is_refused() -> None:
    layout, model = build_model("full")
    with pytest.raises(CallerError, match="chunk 2 ends at token 48"):
        Reference(model, layout).cell_bytes(prompt_of(47), 0, 0, 2)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown model 'half'"):
        build_model("half")


def test_constants_are_the_same_everywhere() -> None:
    """A change of these values makes every recorded case and every stored cell worthless: it must be on purpose."""
    layout, model = build_model("full+window+recurrent", 2)
    assert Reference(model, layout).tokens(range(1, 50), 4) == [552442385, 12931274, 1071715844, 734104424]
