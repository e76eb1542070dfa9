"""`Mutant`: one deliberate bug in the production code, as data: which text in which function becomes which other text.

A mutant names what a good engineer could have written instead, says why it is wrong (with the public reports it is
made after), and which oracles may be the first to see it. Three kinds:

    bug     caught within `budget_seeds` seeds of the swarm
    hard    a bug that needs a rare meeting of events: fewer than ten catches in a thousand seeds
    safe    one of two safeguards is taken away, `behind` says which one is left: no oracle sees anything, ever

Nothing is held or freed here; `kvcore.ladder.zoo.patch` applies the edits and takes them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bug", "hard", "safe"]

BUG_SEEDS = 200
SAFE_SEEDS = 400
HARD_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Edit:
    """In the function `target` ("kvcore.l1:L1Cache._publish") the text `old`, which stands there once, becomes `new`.

    Both are lines as they stand in the file, without the indentation that all lines of the function share.
    """

    target: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug. `oracles`: any of these may be the first to see it; a safe mutant has none.

    `planes`: fault planes that a seed is drawn with (None: all). `transfer`: who copies then ("": drawn).
    `behind`: the safeguard that is left. `note`: why it is not caught within its budget, where that is so.
    """

    name: str
    kind: Kind
    group: str  # of the public reports, "A" to "L"
    reason: str
    edits: tuple[Edit, ...]
    oracles: tuple[str, ...] = ()
    budget_seeds: int = BUG_SEEDS
    planes: tuple[str, ...] | None = None
    transfer: str = ""
    behind: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        assert self.edits, f"{self.name} changes nothing"
        assert bool(self.oracles) != (self.kind == "safe"), f"{self.name}: expected oracles belong to bugs, not to safe"
        assert bool(self.behind) == (self.kind == "safe"), f"{self.name}: a safe mutant says what stands behind it"


def bug(name: str, group: str, reason: str, oracles: str, *edits: Edit, **more: object) -> Mutant:
    """A mutant that is caught soon. `oracles` are names separated by blanks."""
    return Mutant(name, "bug", group, reason, edits, tuple(oracles.split()), **more)  # type: ignore[arg-type]


def hard(name: str, group: str, reason: str, oracles: str, *edits: Edit, **more: object) -> Mutant:
    """A mutant that is caught seldom."""
    seeds = {"budget_seeds": HARD_SEEDS, **more}
    return Mutant(name, "hard", group, reason, edits, tuple(oracles.split()), **seeds)  # type: ignore[arg-type]


def safe(name: str, group: str, reason: str, behind: str, *edits: Edit, **more: object) -> Mutant:
    """The removal of one safeguard of two."""
    seeds = {"budget_seeds": SAFE_SEEDS, **more}
    return Mutant(name, "safe", group, reason, edits, behind=behind, **seeds)  # type: ignore[arg-type]
