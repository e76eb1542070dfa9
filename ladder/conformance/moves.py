"""One call of a run, and the strategy that draws runs.

A `Move` is plain data, so that a run can be shown, shrunk, sent to another process and played again. Copies are
numbered by the run: `write` begins and ends the next copy at once, `end_copy` ends the oldest of those that are open.
"""

from __future__ import annotations

from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

ROOM = 3
KEYS = range(4)
TAGS = ("w1", "w2")
OWNERS = ("A", "B")
PARTS_MIN, PARTS_MAX = 4, 12


class Move(NamedTuple):
    """Fields that the call does not take are as they are here."""

    call: str
    tag: str = ""
    owner: str = ""
    keys: tuple[int, ...] = ()
    temporary: bool = False
    units: int = 0

    def __str__(self) -> str:
        parts = [self.tag, self.owner, " ".join(f"k{key}" for key in self.keys)]
        parts += ["temporary"] if self.temporary else []
        parts += [f"{self.units}"] if self.units else []
        return f"{self.call}({', '.join(part for part in parts if part)})"


def _alone() -> list[Move]:
    """Every move; what is there more often is drawn more often."""
    keys = [(key,) for key in (0, 0, *KEYS)]
    at = [(tag, key) for key in keys for tag in TAGS]
    by = [(owner, key) for key in keys for owner in OWNERS]
    reserve = [Move("reserve_write", tag, keys=key, temporary=flag) for tag, key in at for flag in (False, True)]
    pairs = [Move("reserve_write", TAGS[0], keys=pair) for pair in ((0, 0), (0, 1), (2, 3))]
    write = [Move(call, tag, keys=key) for call in ("write", "finish_write") for tag, key in at]
    copy = [Move(call, tag, keys=key) for call in ("begin_copy", "abort_write") for tag, key in at]
    publish = [Move("publish_and_read", tag, owner, key) for tag, key in at for owner in OWNERS]
    read = [Move(call, owner=owner, keys=key) for call in ("reserve_read", "read", "finish_read") for owner, key in by]
    time = [Move("pass_time", units=units) for units in (1, 2)]
    rest = [Move("delete", keys=key) for key in keys] + [Move("end_copy"), Move("used")] * 4
    return [*reserve, *pairs, *write, *copy, *publish, *2 * read, *6 * time, *rest]


def _together() -> list[tuple[Move, ...]]:
    """What usually comes together: an object is published, perhaps with a reader, or a copy into it has begun."""
    found: list[tuple[Move, ...]] = []
    for tag, key, flag in product(TAGS, [(0,), (0,), (0,), (1,), (2,)], (False, True)):
        reserve, write = Move("reserve_write", tag, keys=key, temporary=flag), Move("write", tag, keys=key)
        found.append((reserve, Move("begin_copy", tag, keys=key)))
        for owner in OWNERS:
            found.append((reserve, write, Move("publish_and_read", tag, owner, key)))
        if not flag:
            found.append((reserve, write, Move("finish_write", tag, keys=key)))
            found.append((*found[-1], Move("reserve_read", owner=OWNERS[0], keys=key)))
    return found


def runs(parts_min: int = PARTS_MIN) -> SearchStrategy[list[Move]]:
    """Lists of moves, a draw for each part; short ones find little, and what is too much is taken out later."""
    import hypothesis.strategies as st

    part = st.sampled_from([*((move,) for move in _alone()), *_together()])
    return st.lists(part, min_size=parts_min, max_size=PARTS_MAX).map(lambda parts: list(chain.from_iterable(parts)))
