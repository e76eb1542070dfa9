"""One run: every move is answered by the model of the contract and by the peer, side by side.

Theory of operation
-------------------
`play` yields a `Step` per move that means something in the model's world (a read without a lease, say, is left out).
A step in which the peer's word stands for nothing that the contract allows is a *difference*.

What follows a difference is worth looking at once: where the contract refuses and changes nothing, but the peer did
something, the run goes on with the model as it was. If then a reader's bytes change, a leased object goes or an
unfinished one is seen, that is a *consequence*, and it is what makes the difference matter. After any other difference
the two worlds have nothing to do with each other any more, and the run ends; so it does after a consequence.

An exception of the peer is an answer too, and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcore.ladder.conformance.contract import Contract, Words, words
from kvcore.ladder.conformance.moves import ROOM, Move
from kvcore.ladder.conformance.peer import WORDS, PeerCache

Means = Mapping[str, Mapping[str, Sequence[str]]]
REFUSED = words("unknown", "expired", "busy", "locked")


@dataclass(frozen=True, slots=True)
class Step:
    """`expected` and `said`: one per key of a batch, one otherwise."""

    move: Move
    expected: tuple[Words, ...]
    said: tuple[str, ...]
    agrees: bool
    harm: bool = False

    @property
    def can_go_on(self) -> bool:
        """Has the contract refused, so that its world is as it was, and the peer answered like a cache?"""
        refused = bool(self.expected) and all(each <= REFUSED for each in self.expected)
        return refused and not self.said_text.startswith("raises ")

    @property
    def expected_text(self) -> str:
        return ", ".join(" or ".join(sorted(each)) for each in self.expected)

    @property
    def said_text(self) -> str:
        return ", ".join(self.said)


def play(moves: Sequence[Move], cache: PeerCache, means: Means) -> Iterator[Step]:
    """Closes the cache at the end."""
    run = _Run(cache, means)
    differences = 0
    try:
        for move in moves:
            step = run.step(move)
            if step is None:
                continue
            if not step.agrees:
                differences += 1
            if step.agrees or differences == 1 or step.harm:
                yield step
            if not step.agrees and (differences > 1 or not step.can_go_on):
                return
    finally:
        cache.close()


class _Run:
    """The model, the peer and the numbers of copies and contents of one run."""

    def __init__(self, cache: PeerCache, means: Means) -> None:
        self.model = Contract(ROOM)
        self.cache = cache
        self._means = means
        self._copies = 0
        self._values = 0

    def step(self, move: Move) -> Step | None:
        """None: the move means nothing here."""
        return _ACTS[move.call](self, move)

    def _asked(self, move: Move, expected: tuple[Words, ...], ask: Callable[[], Sequence[str]]) -> Step:
        try:
            said = tuple(ask())
        except Exception as error:
            kind = getattr(error, "kind", type(error).__name__)
            return Step(move, expected, (f"raises {kind}",), False)
        meant = [self._meaning(move.call, word) for word in said]
        agrees = len(said) == len(expected) and all(map(Words.intersection, expected, meant))
        return Step(move, expected, said, agrees, not agrees and _is_harm(move.call, expected, meant))

    def _meaning(self, call: str, word: str) -> Words:
        return frozenset(self._means.get(call, {}).get(word, (word,)))

    # Writing

    def _reserve_write(self, move: Move) -> Step:
        expected = self.model.reserve_write(move.tag, move.keys, move.temporary)
        step = self._asked(move, expected, lambda: self.cache.reserve_write(move.tag, move.keys, move.temporary))
        wrong = self.model.settle(self.cache.resident()) if step.agrees else None
        return step if wrong is None else Step(move, expected, (*step.said[:-1], wrong), False)

    def _finish_write(self, move: Move) -> Step | None:
        at = (move.tag, move.keys[0])
        staged = self.model.staged.get(at)
        if staged is not None and staged.temporary:
            return None  # published for nobody: caches may do with it what they like
        return self._asked(move, (self.model.finish_write(*at),), lambda: [self.cache.finish_write(*at)])

    def _publish_and_read(self, move: Move) -> Step:
        at = (move.tag, move.owner, move.keys[0])
        return self._asked(move, (self.model.publish_and_read(*at),), lambda: [self.cache.publish_and_read(*at)])

    def _abort_write(self, move: Move) -> Step:
        at = (move.tag, move.keys[0])
        return self._asked(move, (self.model.abort_write(*at),), lambda: [self.cache.abort_write(*at)])

    def _begin_copy(self, move: Move) -> Step:
        self._copies += 1
        at = (self._copies, move.tag, move.keys[0])
        return self._asked(move, (self.model.begin_copy(*at),), lambda: [self.cache.begin_copy(*at)])

    def _end_copy(self, move: Move) -> Step | None:
        if not self.model.copies:
            return None
        self._values += 1
        at = (next(iter(self.model.copies)), self._values)
        return self._asked(move, (self.model.end_copy(*at),), lambda: [self.cache.end_copy(*at)])

    def _write(self, move: Move) -> Step | None:
        """A copy that begins and ends at once, where there is something to copy to."""
        if (move.tag, move.keys[0]) not in self.model.staged:
            return None
        begun = self._begin_copy(move)
        if not begun.agrees:
            return begun
        copy = self._copies
        self._values += 1
        at = (copy, self._values)
        return self._asked(move, (self.model.end_copy(*at),), lambda: [self.cache.end_copy(*at)])

    # Reading

    def _reserve_read(self, move: Move) -> Step:
        at = (move.owner, move.keys[0])
        return self._asked(move, (self.model.reserve_read(*at),), lambda: [self.cache.reserve_read(*at)])

    def _read(self, move: Move) -> Step | None:
        at = (move.owner, move.keys[0])
        if not self.model.holds(*at):
            return None
        value = self.model.objects[move.keys[0]].value
        if value is None:
            return None
        return self._asked(move, (words(f"content {value}"),), lambda: [_content(self.cache.read(*at))])

    def _finish_read(self, move: Move) -> Step:
        at = (move.owner, move.keys[0])
        return self._asked(move, (self.model.finish_read(*at),), lambda: [self.cache.finish_read(*at)])

    # The rest

    def _delete(self, move: Move) -> Step:
        return self._asked(move, (self.model.delete(*move.keys),), lambda: [self.cache.delete(*move.keys)])

    def _pass_time(self, move: Move) -> Step:
        self.model.pass_time(move.units)

        def ask() -> list[str]:
            self.cache.pass_time(move.units)
            return []

        return self._asked(move, (), ask)

    def _used(self, move: Move) -> Step:
        return self._asked(move, (words(f"{self.model.used()} objects"),), lambda: [f"{self.cache.used()} objects"])


def _content(value: int | None) -> str:
    return "nothing to read" if value is None else f"content {value}"


def _is_harm(call: str, expected: tuple[Words, ...], meant: Sequence[Words]) -> bool:
    """Somebody reads other bytes, loses what is leased, or sees what is not finished."""
    if call == "read":
        return True
    took = any("deleted" in each for each in meant)
    seen = any("reserved" in each for each in meant)
    lost = expected == (words("reserved"),) and not seen
    return (call == "delete" and took and expected == (words("locked"),)) or (
        call == "reserve_read" and (lost or (seen and expected == (words("unknown"),)))
    )


_ACTS: dict[str, Callable[[_Run, Move], Step | None]] = {
    "reserve_write": _Run._reserve_write,
    "finish_write": _Run._finish_write,
    "publish_and_read": _Run._publish_and_read,
    "abort_write": _Run._abort_write,
    "begin_copy": _Run._begin_copy,
    "end_copy": _Run._end_copy,
    "write": _Run._write,
    "reserve_read": _Run._reserve_read,
    "read": _Run._read,
    "finish_read": _Run._finish_read,
    "delete": _Run._delete,
    "pass_time": _Run._pass_time,
    "used": _Run._used,
}
assert set(WORDS) <= set(_ACTS)
