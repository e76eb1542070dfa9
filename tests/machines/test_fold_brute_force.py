"""`fold` and `unfold` against an oracle that looks at one cell at a time and thinks in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from kvcore import groups as groups_module
from kvcore.bitmap import bits, ones
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup, _Rule
from kvcore.ladder.conformance.prefix import Row, uses

CHUNKS_MAX = 12


@dataclass(frozen=True)
class Lookup:
    layout: CacheLayout
    rows: tuple[int, ...]
    chunks: int
    prompt_tokens: int
    skip_chunks: int


def cell_is_used(lookup: Lookup, group: ObjectGroup, chunk: int, length: int) -> bool:
    """Whether serving `length` chunks reads this cell: by the tokens inside it, one by one."""
    row = Row(group.kind.value, group.window_tokens)
    return chunk >= lookup.skip_chunks and uses(row, chunk, length, lookup.layout.chunk_tokens, lookup.prompt_tokens)


def is_servable(lookup: Lookup, length: int) -> bool:
    for row, present in zip(lookup.layout.rows, lookup.rows):
        group = lookup.layout.groups[row.group]
        full_hit = length > 0 and length * lookup.layout.chunk_tokens == lookup.prompt_tokens
        if full_hit and group.kind is GroupKind.RECURRENT:
            return False
        for chunk in range(lookup.chunks):
            if cell_is_used(lookup, group, chunk, length) and not present >> chunk & 1:
                return False
    return True


@st.composite
def groups(draw: st.DrawFn, chunk_tokens: int) -> ObjectGroup:
    kind = draw(st.sampled_from(list(GroupKind)))
    block_tokens = draw(st.sampled_from([size for size in range(1, chunk_tokens + 1) if chunk_tokens % size == 0]))
    window = draw(st.integers(1, 3 * chunk_tokens + 2)) if kind is GroupKind.WINDOW else None
    return ObjectGroup(kind, block_tokens, draw(st.integers(1, 9)), window)


@st.composite
def lookups(draw: st.DrawFn) -> Lookup:
    chunk_tokens = draw(st.integers(1, 6))
    members = tuple(draw(st.lists(groups(chunk_tokens), min_size=1, max_size=4)))
    layout = CacheLayout(members, draw(st.integers(1, 3)), chunk_tokens)
    chunks = draw(st.integers(0, CHUNKS_MAX))
    # many ones: otherwise nearly nothing is ever servable
    row = st.lists(st.integers(0, 5).map(bool), min_size=chunks, max_size=chunks)
    rows = [sum(1 << chunk for chunk, there in enumerate(draw(row)) if there) for _ in layout.rows]
    tail = draw(st.sampled_from([0, 0, 1, chunk_tokens - 1, chunk_tokens, 3 * chunk_tokens]))
    skip_chunks = draw(st.just(0) | st.integers(0, chunks + 2))
    return Lookup(layout, tuple(rows), chunks, chunks * chunk_tokens + tail, skip_chunks)


@settings(max_examples=settings.default.max_examples * 4, deadline=None)
@given(lookups())
def test_fold_gives_exactly_the_lengths_that_the_oracle_can_serve(lookup: Lookup) -> None:
    expected = [length for length in range(lookup.chunks + 1) if is_servable(lookup, length)]
    lengths = lookup.layout.fold(lookup.rows, lookup.chunks, lookup.prompt_tokens, lookup.skip_chunks)
    assert list(bits(lengths)) == expected
    assert lookup.layout.best(lengths) == expected[-1]
    event(f"best is {'0' if expected[-1] == 0 else 'all' if expected[-1] == lookup.chunks else 'between'}")


@settings(max_examples=settings.default.max_examples * 4, deadline=None)
@given(lookups())
def test_unfold_names_exactly_the_cells_that_the_oracle_reads(lookup: Lookup) -> None:
    layout = lookup.layout
    for length in bits(layout.fold(lookup.rows, lookup.chunks, lookup.prompt_tokens, lookup.skip_chunks)):
        needed = layout.unfold(length, lookup.prompt_tokens, lookup.skip_chunks)
        for row in layout.rows:
            group = layout.groups[row.group]
            expected = [chunk for chunk in range(lookup.chunks) if cell_is_used(lookup, group, chunk, length)]
            assert list(bits(needed[row.index])) == expected


@settings(max_examples=settings.default.max_examples * 2, deadline=None)
@given(lookups(), st.data())
def test_a_length_is_served_by_what_unfold_keeps_and_by_nothing_less(lookup: Lookup, data: st.DataObject) -> None:
    layout, chunks, tokens, skip = lookup.layout, lookup.chunks, lookup.prompt_tokens, lookup.skip_chunks
    length = data.draw(st.sampled_from(list(bits(layout.fold(lookup.rows, chunks, tokens, skip)))))
    kept = layout.unfold(length, tokens, skip)
    assert layout.fold(kept, chunks, tokens, skip) >> length & 1
    for row, mask in enumerate(kept):
        for chunk in bits(mask):
            less = [*kept]
            less[row] ^= 1 << chunk
            assert not layout.fold(less, chunks, tokens, skip) >> length & 1


@settings(max_examples=settings.default.max_examples * 2, deadline=None)
@given(lookups())
def test_explain_agrees_with_fold(lookup: Lookup) -> None:
    layout, chunks, tokens, skip = lookup.layout, lookup.chunks, lookup.prompt_tokens, lookup.skip_chunks
    lengths = layout.fold(lookup.rows, chunks, tokens, skip)
    for length in range(chunks + 1):
        text = layout.explain(lookup.rows, chunks, tokens, length, skip)
        assert text.endswith(": servable") == bool(lengths >> length & 1)


@settings(max_examples=settings.default.max_examples * 2, deadline=None)
@given(lookups())
def test_usable_tokens_leave_at_least_one_to_compute(lookup: Lookup) -> None:
    layout, tokens = lookup.layout, lookup.prompt_tokens
    for length in bits(layout.fold(lookup.rows, lookup.chunks, tokens, lookup.skip_chunks)):
        usable = layout.usable_tokens(length, tokens)
        assert usable == min(length * layout.chunk_tokens, max(tokens - 1, 0))


# --- planted bugs


def fold_differs() -> bool:
    """Whether the comparison with brute force fails, in the same search each time."""

    @settings(max_examples=500, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
    @given(lookups())
    def compare(lookup: Lookup) -> None:
        expected = [length for length in range(lookup.chunks + 1) if is_servable(lookup, length)]
        lengths = lookup.layout.fold(lookup.rows, lookup.chunks, lookup.prompt_tokens, lookup.skip_chunks)
        assert list(bits(lengths)) == expected

    try:
        compare()
    except AssertionError:
        return True
    return False


def test_a_hit_that_counts_ones_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: presence is counted although a hole makes what follows useless."""

    def fold(self: CacheLayout, rows: tuple[int, ...], chunks: int, prompt_tokens: int, skip_chunks: int = 0) -> int:
        present = [(row | ones(min(skip_chunks, chunks))) & ones(chunks) for row in rows]
        return ones(min(row.bit_count() for row in present) + 1)

    monkeypatch.setattr(CacheLayout, "fold", fold)
    assert fold_differs()


def test_a_full_hit_on_a_recurrent_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R07: the snapshot already contains the token that is to be computed."""
    original = _Rule.serves_full_hit

    def serves_full_hit(self: _Rule, present: int, chunks: int) -> bool:
        if self.kind is GroupKind.RECURRENT:
            return bool(present >> (chunks - 1) & 1)
        return original(self, present, chunks)

    monkeypatch.setattr(_Rule, "serves_full_hit", serves_full_hit)
    assert fold_differs()


def test_a_full_hit_that_asks_a_window_for_as_little_as_any_other_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14 c: one token is computed again there, and it sees one token further back."""
    monkeypatch.setattr(_Rule, "serves_full_hit", lambda self, present, chunks: self.kind is not GroupKind.RECURRENT)
    assert fold_differs()


def test_a_window_in_whole_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: the chunk that the window touches with one token only is left out."""
    monkeypatch.setattr(groups_module, "_ceil_div", lambda value, divisor: value // divisor)
    assert fold_differs()
