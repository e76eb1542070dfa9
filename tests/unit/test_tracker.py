"""`RequestTracker` and the cells it plans: phases, promises, generations, what may be stored. No loop, no client."""

from __future__ import annotations

import pytest

from kvcore.connectors.cells import cell_blocks, chunks_of_blocks, load_cells, store_cells
from kvcore.connectors.tracker import Phase, RequestTracker
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup

FULL = ObjectGroup(GroupKind.FULL, 2, 8)
WINDOW = ObjectGroup(GroupKind.WINDOW, 4, 8, 6)
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 4, 8)
ONE = CacheLayout((FULL,), 1, 4)
HYBRID = CacheLayout((FULL, WINDOW, RECURRENT), 2, 4)
HASHES = [bytes([chunk]) * 4 for chunk in range(16)]


def tracker(layout: CacheLayout = ONE) -> RequestTracker:
    return RequestTracker(layout, "r", "r#1", 1, hashes=list(HASHES))


def known(tokens: int, local: int = 0, lengths: int | None = None, layout: CacheLayout = ONE) -> RequestTracker:
    """After a lookup that found everything, or the given lengths."""
    made = tracker(layout)
    made.look(range(tokens), local)
    made.fix((1 << tokens // 4 + 1) - 1 if lengths is None else lengths)
    return made


def table(tokens: int, first: int = 1) -> tuple[list[int]]:
    return (list(range(first, first + -(-tokens // 2))),)


def loading(tokens: int, local: int = 0, external: int | None = None) -> RequestTracker:
    made = known(tokens, local)
    promised = made.promise(local)
    assert external is None or promised == external
    made.take_load(table(tokens))
    return made


# --- promises


@pytest.mark.parametrize(
    ("tokens", "local", "promised"),
    [(16, 0, 15), (17, 0, 16), (4, 0, 3), (17, 6, 10), (17, 16, 0), (16, 15, 0), (3, 0, 0)],
)
def test_a_promise_lies_between_zero_and_all_but_the_last_token(tokens: int, local: int, promised: int) -> None:
    made = known(tokens, local)
    assert made.promise(local) == promised
    assert made.promise(local) == promised, "asking twice"


def test_a_lookup_answers_a_longer_local_prefix_and_no_shorter_one() -> None:
    made = known(17, 8)
    assert made.answers(17, 8)
    assert made.answers(17, 12)
    assert not made.answers(17, 7)
    assert not made.answers(18, 8), "the tokens have changed"


def test_an_attempt_that_has_begun_answers_nothing_more() -> None:
    made = known(17)
    made.decline()
    assert made.phase is Phase.RUNNING
    assert not made.answers(17, 0)


def test_phases_cannot_be_skipped() -> None:
    with pytest.raises(AssertionError):
        tracker().fix(1)
    with pytest.raises(AssertionError):
        known(17).look(range(17), 0)
    with pytest.raises(AssertionError):
        known(17).take_load(table(17))  # nothing was promised
    with pytest.raises(AssertionError):
        tracker().schedule(0, 4, range(17))


def test_a_new_request_knows_nothing_and_has_nothing() -> None:
    made = tracker()
    assert (made.phase, made.lengths, made.length) == (Phase.IDLE, 1, 0)
    assert (made.looked_up_tokens, made.skip_chunks, made.local_tokens, made.promised_tokens) == (0, 0, 0, 0)
    assert (made.delivered_tokens, made.computed_tokens, made.step_tokens, made.stored_chunks) == (0, 0, (0, 0), 0)
    assert (made.load_failures, made.bad_chunk, made.watched, len(made.cached_chunks)) == (0, None, {}, 0)
    assert (made.resumed, made.leased, made.stores_planned) == (False, False, False)
    made.next_generation(2)
    made.generation = 1
    assert made == tracker(), "nor has a new attempt that follows nothing"


def test_a_generation_ends_only_without_leases_and_forgets_everything() -> None:
    made = loading(17)
    with pytest.raises(AssertionError):
        made.next_generation(2)
    made.leased = False
    made.schedule(16, 1, range(17))
    made.end_load(False)
    made.next_generation(2)
    fresh = tracker()
    fresh.next_generation(2)
    fresh.resumed, fresh.tokens = True, range(17)
    assert made == fresh
    with pytest.raises(AssertionError):
        made.next_generation(2)


# --- loads


def test_a_load_covers_the_promise_and_leaves_the_engines_blocks_alone() -> None:
    made = known(17)
    assert made.promise(6) == 10
    cells = made.take_load(table(17))
    assert [(cell.chunk, cell.blocks) for cell in cells] == [(1, (0, 4)), (2, (5, 6)), (3, (7, 8))]
    assert made.watched == {4: 1, 5: 2, 6: 2, 7: 3, 8: 3}
    assert not made.confirmed


def test_nothing_is_due_until_the_load_is_confirmed_and_loaded_chunks_never_are() -> None:
    made = loading(24)
    made.schedule(23, 1, range(24))
    assert made.chunks_due == 0
    assert made.take_stores(table(24)) == []
    assert made.end_load(False) is True
    assert made.delivered_tokens == 23
    made.schedule(24, 4, range(28))
    assert [cell.chunk for cell in made.take_stores(table(28))] == [6]


def test_the_first_bad_chunk_of_all_reports_counts_whatever_their_order() -> None:
    made = loading(17)
    for block in (7, 3, 5):
        made.note_errors(frozenset({block}))
    assert made.end_load(False) is False
    assert (made.load_failures, made.bad_chunk, made.watched) == (1, None, {})
    assert made.cached_chunks == range(1)


def test_a_failed_load_takes_back_what_was_computed_over_it() -> None:
    made = loading(25)
    made.schedule(24, 1, range(25))
    made.note_errors(frozenset({5}))
    made.end_load(False)
    assert made.computed_tokens == 8
    assert made.take_stores(table(25)) == []
    made.schedule(8, 17, range(25))
    assert [cell.chunk for cell in made.take_stores(table(25))] == [2, 3, 4, 5], "recomputed ones are stored"


def test_a_load_that_failed_as_a_whole_leaves_nothing() -> None:
    made = loading(25, 4)
    made.schedule(24, 1, range(25))
    assert made.end_load(True) is False
    assert (made.computed_tokens, len(made.cached_chunks), made.delivered_tokens) == (0, 0, 0)


def test_a_request_that_shares_blocks_of_a_load_waits_for_its_end() -> None:
    made = known(25, lengths=1)
    made.decline()
    made.schedule(8, 17, range(25))
    made.watch(frozenset({3, 4, 99}), table(25))
    assert made.take_stores(table(25)) == []
    made.note_errors(frozenset({3}))
    assert made.end_load(False) is False
    assert made.load_failures == 0, "it was not its own load"
    assert [cell.chunk for cell in made.take_stores(table(25))] == [0]


def test_a_load_is_not_repeated_after_it_was_delivered() -> None:
    made = loading(16)
    assert not made.has_delivered(14)
    made.end_load(False)
    assert made.has_delivered(14), "15 tokens, seen in whole blocks"
    assert not made.has_delivered(8), "the engine has lost some of it"
    made.schedule(15, 1, range(16))
    assert not made.has_delivered(14)


# --- stores


def test_the_sampled_token_and_drafts_do_not_complete_a_chunk() -> None:
    made = known(7, lengths=1)
    made.decline()
    made.schedule(0, 12, range(7))  # 5 drafts behind 7 known tokens
    assert [cell.chunk for cell in made.take_stores(table(12))] == [0]
    made.schedule(7, 1, range(8))
    assert [cell.chunk for cell in made.take_stores(table(12))] == [1]
    assert made.take_stores(table(12)) == []


def test_chunks_before_the_lookup_are_stored_and_loaded_ones_are_not() -> None:
    made = loading(21, 8)
    made.schedule(20, 1, range(21))
    made.end_load(False)
    made.schedule(21, 3, range(24))
    assert [cell.chunk for cell in made.take_stores(table(24))] == [0, 1, 5]


def test_a_cell_with_a_null_block_or_beyond_the_table_does_not_exist() -> None:
    blocks = ([1, 2, 3, 4, 5], [0, 7, 8], [0, 0, 9])
    cells = store_cells(HYBRID, HASHES, range(3), blocks, (8, 12))
    assert [(cell.group, cell.chunk, cell.blocks) for cell in cells] == [
        (0, 0, (1, 2)),
        (0, 1, (3, 4)),
        (1, 1, (7,)),
        (1, 2, (8,)),
        (2, 2, (9,)),
    ]


def test_a_recurrent_state_is_stored_only_where_a_step_began_or_ended() -> None:
    blocks = ([1] * 6, [1] * 3, [4, 5, 6])
    for state_tokens, chunks in (((0, 12), [2]), ((8, 12), [1, 2]), ((8, 11), [1]), ((0, 0), [])):
        cells = store_cells(HYBRID, HASHES, range(3), blocks, state_tokens)
        assert [cell.chunk for cell in cells if cell.group == 2] == chunks


def test_loads_leave_out_what_lies_outside_the_window_or_is_the_engines() -> None:
    blocks = ([1, 2, 3, 4, 5, 6], [0, 7, 8], [0, 0, 9])
    cells = load_cells(HYBRID, HASHES, HYBRID.unfold(3, 13)[:3], blocks, 2)
    assert [(cell.group, cell.chunk, cell.blocks) for cell in cells] == [
        (0, 0, (0, 2)),
        (0, 1, (3, 4)),
        (0, 2, (5, 6)),
        (1, 1, (7,)),
        (1, 2, (8,)),
        (2, 2, (9,)),
    ]


def test_a_recurrent_state_inside_the_engines_own_prefix_is_not_loaded() -> None:
    layout = CacheLayout((RECURRENT,), 1, 4)
    for local_tokens, chunks in ((3, [0, 1]), (4, [1]), (7, [1]), (8, [])):
        cells = load_cells(layout, HASHES, [0b11], ([5, 6],), local_tokens)
        assert [cell.chunk for cell in cells] == chunks


def test_blocks_know_their_chunk_in_every_group() -> None:
    blocks = ([1, 2, 3, 4, 5, 6], [0, 7, 8], [0, 0, 9])
    assert chunks_of_blocks(HYBRID, blocks, frozenset({1, 4, 6, 7, 9, 50})) == {1: 0, 4: 1, 6: 2, 7: 1, 9: 2}
    for group in range(3):
        for chunk in range(3):
            for block in cell_blocks(HYBRID, group, chunk, blocks):
                assert not block or chunks_of_blocks(HYBRID, blocks, frozenset({block})) == {block: chunk}
