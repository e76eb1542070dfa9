"""Sometimes marks: rare states that a good swarm must reach, by name.

A run without findings proves little if it never met a lease that ran out under a copy. So such states have names:

    DISCARDED = sometimes("l1.loser_discarded", "a second writer of a key that was resident by then", common=True)

A mark is made once, when its module is imported; a second one of the same name is refused. `kvcore.sim.marks` imports
every module that makes marks, so `registered()` after importing it is the whole list, the same in every process.

Whoever watches a run hits the marks: the oracles, subscribers of the trace, the engine's probe, and readers of the
components' own statistics. The production code knows nothing of them. A hit takes no part in the run: it is no trace
event, draws nothing and decides nothing.

`common`: a swarm of `seeds` seeds reaches it, whichever seeds they are; unseen, such a swarm fails. The others are
counted and reported. A share p of all seeds is missed by n of them with probability (1 - p)^n: `seeds` is to be so
large that this is less than one in a thousand.

Who holds: the module that makes a mark holds it for ever; `Findings.sometimes` holds the counts of one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcore.errors import CallerError


@dataclass(frozen=True, slots=True)
class Mark:
    """One named state. `about` says in one sentence what happened when it is hit."""

    name: str
    about: str
    common: bool
    seeds: int


_MARKS: dict[str, Mark] = {}  # every module's marks, in the order of import; only `sometimes` writes it


def sometimes(name: str, about: str, *, common: bool = False, seeds: int = 200) -> Mark:
    """Register a mark. `CallerError` for a name that is taken or has no plane ("plane.what"), or without a sentence."""
    if name in _MARKS:
        raise CallerError(f"there is a mark {name!r} already: {_MARKS[name].about}")
    if not all(name.partition(".")) or not about.strip():
        raise CallerError(f"a mark needs a name 'plane.what' and a sentence, not {name!r}, {about!r}")
    mark = _MARKS[name] = Mark(name, about, common, seeds)
    return mark


def registered() -> dict[str, Mark]:
    """All marks by name, sorted. Import `kvcore.sim.marks` first, or ask for `kvcore.sim.marks.all_marks()`."""
    return dict(sorted(_MARKS.items()))


class Sometimes:
    """The hits of one run."""

    def __init__(self) -> None:
        self._counts: dict[Mark, int] = {}

    def hit(self, mark: Mark, times: int = 1) -> None:
        """The state was met, `times` times (0: not)."""
        if times > 0:
            self._counts[mark] = self._counts.get(mark, 0) + times

    @property
    def counts(self) -> dict[str, int]:
        """By name, sorted; marks that were not hit are not there."""
        return dict(sorted((mark.name, count) for mark, count in self._counts.items()))


def unseen(
    counts: Mapping[str, int], marks: Iterable[Mark] | None = None, *, common: bool = True, seeds: int | None = None
) -> list[str]:
    """The marks that `counts` lacks, in order; only the common ones unless told otherwise.

    `seeds`: only those that a swarm of so many has met.
    """
    known = _MARKS.values() if marks is None else marks
    asked = [mark for mark in known if (mark.common or not common) and (seeds is None or mark.seeds <= seeds)]
    return sorted(mark.name for mark in asked if not counts.get(mark.name))


def report(counts: Mapping[str, int]) -> dict[str, int | list[str]]:
    """The `sometimes` object of a swarm's JSON: marks that were hit, all marks, and the common ones that were not."""
    return {
        "hit": sum(bool(counts.get(name)) for name in _MARKS),
        "total": len(_MARKS),
        "unseen": [*unseen(counts)],
    }
