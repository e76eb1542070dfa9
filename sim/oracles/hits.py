"""`HitOracle`: is the promise what the rule allows for what the servers hold? Brute force, token by token.

Nothing of `groups.py` or `bitmap.py` is used: for each length, for each row, it walks the tokens that the next
computed token may attend to and asks for the cell of each. Slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvcore.groups import CacheLayout, GroupKind
from kvcore.sim.marks.engine import ACROSS_HOLE
from kvcore.sim.oracles.findings import Findings

Cell = tuple[int, int, bytes]
"""(group, rank, chunk hash)"""


def usable_prefix(
    layout: CacheLayout, hashes: Sequence[bytes], prompt_tokens: int, present: Callable[[Cell], bool], skip: int
) -> int:
    """The most tokens that cells for which `present` holds can serve; chunks below `skip` are there anyway."""
    for length in range(min(len(hashes), prompt_tokens // layout.chunk_tokens), 0, -1):
        tokens = min(length * layout.chunk_tokens, prompt_tokens - 1)
        if _servable(layout, hashes, length, tokens, present, skip):
            return tokens
    return 0


def _servable(
    layout: CacheLayout,
    hashes: Sequence[bytes],
    length: int,
    tokens: int,
    present: Callable[[Cell], bool],
    skip: int,
) -> bool:
    """Can the KV of `length` chunks stand for the first `tokens` tokens?"""
    for group, spec in enumerate(layout.groups):
        if spec.kind is GroupKind.RECURRENT:
            if tokens != length * layout.chunk_tokens:
                return False  # the snapshot already contains the token that is to be computed
            needed: Collection[int] = (length - 1,)
        elif spec.kind is GroupKind.WINDOW:
            assert spec.window_tokens is not None
            visible = range(max(0, tokens - spec.window_tokens + 1), tokens)
            needed = {token // layout.chunk_tokens for token in visible}
        else:
            needed = range(length)
        for chunk in needed:
            if chunk >= skip and not all(present((group, rank, hashes[chunk])) for rank in range(layout.ranks)):
                return False
    return True


class HitOracle:
    """Judges the answers of `matched_tokens`. `held(request_id)` names the cells under lease for its current lookup.

    The engine's own prefix when the lookup was made is remembered here, from the questions alone.
    """

    def __init__(self, layout: CacheLayout, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self.answers_checked = 0

    def check_answer(
        self,
        request_id: str,
        answer: int,
        local_tokens: int,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        held: Collection[Cell],
        skip: int,
    ) -> None:
        """`answer` tokens were promised beyond `local_tokens`, on the strength of the cells in `held`."""
        self.answers_checked += 1
        if not 0 <= answer <= max(0, prompt_tokens - 1 - local_tokens):
            self._findings.report("prefix", f"{request_id}: promised {answer} of {prompt_tokens} with {local_tokens}")
        tokens = usable_prefix(self._layout, hashes, prompt_tokens, held.__contains__, skip)
        if answer != max(0, tokens - local_tokens):
            self._findings.report(
                "prefix",
                f"{request_id}: promised {answer} tokens beyond {local_tokens}, brute force over the cells under"
                f" lease says {max(0, tokens - local_tokens)}",
            )
        if answer:
            self._mark_hole(local_tokens + answer, hashes, held, skip)

    def _mark_hole(self, tokens: int, hashes: Sequence[bytes], held: Collection[Cell], skip: int) -> None:
        for group, spec in enumerate(self._layout.groups):
            if spec.kind is not GroupKind.WINDOW:
                continue
            assert spec.window_tokens is not None
            first = max(0, tokens - spec.window_tokens + 1) // self._layout.chunk_tokens
            if any((group, 0, digest) not in held for digest in hashes[skip:first]):
                self._findings.sometimes.hit(ACROSS_HOLE)
