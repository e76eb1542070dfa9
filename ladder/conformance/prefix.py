"""The prefix rule, told token by token, and the search for lookups that a peer answers otherwise.

Theory of operation
-------------------
A row is what one rank keeps of one group of layers; a cell is one chunk of it. Serving the first L chunks of a prompt
means that computing goes on at token L * chunk_tokens, or at the last token where these chunks are the whole prompt.
Then a row uses

    full         every chunk before that token
    window       the chunks with a token that the next one attends to: it attends to itself and window - 1 before it
    recurrent    the one state at the end of chunk L; it contains the last token, so it serves no whole prompt

and L can be served if every row has what it uses. `uses` and `servable` say exactly that, one token at a time, and
share no code with `kvcore.groups`; its own tests use them.

The search asks for one kind of rows at a time and for mixed ones last, so that a difference is shown by the kind that
makes it. Differences are told apart by kind, direction, and whether the whole prompt is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kvcore.ladder.conformance.finding import PrefixDifference
from kvcore.ladder.conformance.peer import PrefixRule

CHUNKS_MAX = 6
CHUNK_TOKENS_MIN, CHUNK_TOKENS_MAX = 2, 4  # nobody stores single tokens, and there every rule has its corner
WINDOW_MAX = 2 * CHUNK_TOKENS_MAX + 2
KINDS = ("full", "window", "recurrent")


@dataclass(frozen=True, slots=True)
class Row:
    """`window`: tokens that one attends to, itself among them; for kind "window" only."""

    kind: str
    window: int | None = None

    @property
    def named(self) -> str:
        """A window of one token needs no past at all, which not everybody's rule can say."""
        return "window of one token" if self.window == 1 else self.kind

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind} of {self.window} tokens"


@dataclass(frozen=True, slots=True)
class Lookup:
    """`present[r]`: the chunks that are there of row r. `chunks`: those that are asked for."""

    chunk_tokens: int
    chunks: int
    prompt_tokens: int
    rows: tuple[Row, ...]
    present: tuple[frozenset[int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "chunk_tokens": self.chunk_tokens,
            "chunks": self.chunks,
            "prompt_tokens": self.prompt_tokens,
            "rows": [[row.kind, row.window] for row in self.rows],
            "present": [sorted(row) for row in self.present],
        }

    def __str__(self) -> str:
        rows = "; ".join(
            f"{row} has chunks {sorted(there)}" for row, there in zip(self.rows, self.present, strict=True)
        )
        return f"prompt of {self.prompt_tokens} tokens, {self.chunks} chunks of {self.chunk_tokens}: {rows}"


def uses(row: Row, chunk: int, length: int, chunk_tokens: int, prompt_tokens: int) -> bool:
    """Whether serving `length` chunks reads this cell: by the tokens inside it, one by one."""
    end = length * chunk_tokens  # the first token that is computed
    if length == 0 or chunk >= length:
        return False
    if row.kind == "full":
        return True
    if row.kind == "recurrent":
        return (chunk + 1) * chunk_tokens == end
    if end == prompt_tokens:
        end -= 1
    assert row.window is not None
    tokens = range(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
    return any(end - row.window < token < end for token in tokens)


def servable(row: Row, there: Sequence[int] | frozenset[int], length: int, lookup: Lookup) -> bool:
    """Whether this row, with these chunks, can serve `length` chunks of the prompt."""
    whole = length > 0 and length * lookup.chunk_tokens == lookup.prompt_tokens
    if whole and row.kind == "recurrent":
        return False
    return all(
        chunk in there
        for chunk in range(lookup.chunks)
        if uses(row, chunk, length, lookup.chunk_tokens, lookup.prompt_tokens)
    )


def fold(lookup: Lookup) -> list[int]:
    """The lengths that every row can serve."""
    rows = list(zip(lookup.rows, lookup.present, strict=True))
    return [
        length
        for length in range(lookup.chunks + 1)
        if all(servable(row, there, length, lookup) for row, there in rows)
    ]


def unfold(lookup: Lookup, length: int) -> list[list[int]]:
    """Per row the cells that serving `length` reads."""
    tokens = lookup.chunk_tokens, lookup.prompt_tokens
    return [[chunk for chunk in range(lookup.chunks) if uses(row, chunk, length, *tokens)] for row in lookup.rows]


def lookups(kinds: Sequence[str], rows_max: int) -> Any:
    """A strategy; many cells are there, because otherwise nearly nothing is servable."""
    import hypothesis.strategies as st

    windows = [Row("window", tokens) for tokens in range(1, WINDOW_MAX + 1)]
    table = [row for kind in kinds for row in (windows if kind == "window" else [Row(kind)])]
    holes = [frozenset(holes) for count in range(3) for holes in combinations(range(CHUNKS_MAX), count)]
    row = st.tuples(st.sampled_from(table), st.sampled_from(holes))

    def lookup(chunk_tokens: int, chunks: int, tail: int, rows: list[tuple[Row, frozenset[int]]]) -> Lookup:
        present = tuple(frozenset(range(chunks)) - missing for _, missing in rows)
        return Lookup(chunk_tokens, chunks, chunks * chunk_tokens + tail, tuple(row for row, _ in rows), present)

    sizes = st.integers(CHUNK_TOKENS_MIN, CHUNK_TOKENS_MAX), st.integers(0, CHUNKS_MAX), st.integers(0, 1)
    return st.builds(lookup, *sizes, st.lists(row, min_size=1, max_size=rows_max))


class Search:
    """One peer's rule against this one."""

    def __init__(self, rule: PrefixRule, examples: int) -> None:
        self._rule = rule
        self._examples = examples
        self._known: dict[str, PrefixDifference] = {}
        self.asked = 0

    def differences(self) -> tuple[PrefixDifference, ...]:
        from kvcore.ladder.conformance.search import first

        for kinds in [(kind,) for kind in KINDS]:
            while (
                met := first(lookups(kinds, 1), lambda lookup: self._new(lookup) is not None, self._examples)
            ) is not None:
                self._note(met)
        if not self._known:
            met = first(lookups(KINDS, 4), lambda lookup: self._new(lookup) is not None, self._examples)
            if met is not None:
                self._note(met)
        return tuple(self._known.values())

    def _note(self, lookup: Lookup) -> None:
        found = self._new(lookup)
        assert found is not None, "the peer answers differently each time"
        self._known[found.what] = found

    def _new(self, lookup: Lookup) -> PrefixDifference | None:
        self.asked += 1
        return next((each for each in self._differences(lookup) if each.what not in self._known), None)

    def _differences(self, lookup: Lookup) -> Iterator[PrefixDifference]:
        tree = lookup.to_json()
        lengths = fold(lookup)
        said = self._asked(lambda: sorted(self._rule.fold(tree)))
        kinds = " and ".join(dict.fromkeys(row.named for row in lookup.rows))
        for what in _fold_whats(lookup, kinds, lengths, said):
            yield PrefixDifference("fold", what, str(lookup), f"serves {lengths}", f"serves {said}")
        for length in lengths:
            cells = unfold(lookup, length)
            kept = self._asked(lambda length=length: [sorted(row) for row in self._rule.unfold(tree, length)])
            if kept != cells:
                what = f"{_direction(cells, kept)}, {kinds}{_whole(lookup, length)}"
                yield PrefixDifference("unfold", what, str(lookup), f"{length} reads {cells}", f"{length} keeps {kept}")

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except Exception as error:
            return f"raises {type(error).__name__}"


def _fold_whats(lookup: Lookup, kinds: str, lengths: list[int], said: Any) -> Iterator[str]:
    if isinstance(said, str):
        yield f"{said}, {kinds}"
        return
    for length in sorted(set(lengths) ^ set(said)):
        does = "does not serve what the contract serves" if length in lengths else "serves what the contract does not"
        yield f"{does}, {kinds}{_whole(lookup, length)}"


def _whole(lookup: Lookup, length: int) -> str:
    return ", the whole prompt" if 0 < length * lookup.chunk_tokens == lookup.prompt_tokens else ""


def _direction(cells: list[list[int]], kept: Any) -> str:
    if isinstance(kept, str) or len(kept) != len(cells):
        return "answers nothing of use"
    less = any(set(each) - set(mine) for each, mine in zip(cells, kept, strict=True))
    return "keeps too little" if less else "keeps more than is read"
