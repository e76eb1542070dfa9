"""Hypothesis looks for runs in which the peer leaves the contract, one difference after the other, each minimised.

Theory of operation
-------------------
1. Play the scenarios (scenarios.py), then draw runs, until one shows a difference that is not known yet. Hypothesis
   shrinks it to simple moves; then every move is left out that can be.
2. Note it: (call, what the contract says, what the peer said). Go on with 1, until a whole search finds nothing new.
3. Where the contract refuses and the peer does something, draw what may follow, and look for harm (play.py).
4. A word of the peer that was seen in two meanings is shown with a run for each.
5. What needed time to pass is played again on the peer's own clock, where it has one (`real_cache`).

The search is derandomized: the same peer gives the same report. How long a difference-free search looks is `examples`;
a difference that takes more luck than that stays unknown, which is why the number is said in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ladder.conformance import prefix
from kvcore.ladder.conformance.finding import Coarse, Comparison, Difference
from kvcore.ladder.conformance.moves import ROOM, Move, runs
from kvcore.ladder.conformance.peer import Peer, PeerCache
from kvcore.ladder.conformance.play import Step, play
from kvcore.ladder.conformance.scenarios import SCENARIOS

EXAMPLES = 2000
DIFFERENCES_MAX = 60
FOLLOWING = 4  # as few runs, of those that search, look for what follows one difference
Key = tuple[str, str, str]


def compare(peer: Peer, examples: int = EXAMPLES) -> Comparison:
    """Everything. ConfigError without Hypothesis."""
    check_installed()
    search = _Search(peer, examples)
    differences = search.differences()
    coarse = search.coarse()
    rule = prefix.Search(peer.prefix, examples) if peer.prefix is not None else None
    found = None if rule is None else rule.differences()
    return Comparison(peer.name, search.played, 0 if rule is None else rule.asked, differences, coarse, found)


def check_installed() -> None:
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise ConfigError("conformance needs hypothesis: pip install 'kvcore[conformance]'") from None


def first(strategy: Any, holds: Callable[[Any], bool], examples: int) -> Any:
    """The smallest value for which `holds`, or None if none was met."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import NoSuchExample

    budget = settings(
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(strategy, holds, settings=budget)
    except NoSuchExample:
        return None


class _Search:
    """One peer, and what is known of it."""

    def __init__(self, peer: Peer, examples: int) -> None:
        self._peer = peer
        self._examples = examples
        self._known: dict[Key, Difference] = {}
        self._meanings: dict[tuple[str, str], dict[str, Sequence[Move]]] = {}
        self.played = 0

    def differences(self) -> tuple[Difference, ...]:
        for moves in SCENARIOS.values():
            while self._new(self._steps(moves)) is not None:
                self._note(moves)
        self._draw(runs(), self._examples)
        for known in [each for each in self._known.values() if not each.consequence and each.run[-1].can_go_on]:
            begun = partial(add, [step.move for step in known.run])
            self._draw(runs(1).map(begun), self._examples // FOLLOWING)
        return tuple(sorted(self._known.values(), key=lambda each: (each.consequence, len(each.run))))

    def _draw(self, strategy: Any, examples: int) -> None:
        while len(self._known) < DIFFERENCES_MAX:
            moves = first(strategy, lambda moves: self._new(self._steps(moves)) is not None, examples)
            if moves is None:
                break
            self._note(moves)

    def _steps(self, moves: Sequence[Move], cache: PeerCache | None = None) -> list[Step]:
        self.played += 1
        steps = list(play(moves, cache or self._peer.cache(ROOM), self._peer.means))
        if all(step.agrees for step in steps):
            self._remember(steps)
        return steps

    def _remember(self, steps: Sequence[Step]) -> None:
        """The shortest run for every meaning of a word."""
        for at, step in enumerate(steps):
            if len(step.expected) == 1 and len(step.expected[0]) == 1:
                (meaning,) = step.expected[0]
                runs_known = self._meanings.setdefault((step.move.call, step.said[0]), {})
                if meaning not in runs_known or at < len(runs_known[meaning]) - 1:
                    runs_known[meaning] = [step.move for step in steps[: at + 1]]

    def _new(self, steps: Sequence[Step]) -> int | None:
        """Where the first difference is that is not known yet."""
        for at, step in enumerate(steps):
            if not step.agrees and key_of(step) not in self._known:
                return at
        return None

    def _new_key(self, moves: Sequence[Move]) -> Key | None:
        steps = self._steps(moves)
        at = self._new(steps)
        return None if at is None else key_of(steps[at])

    def _note(self, moves: Sequence[Move]) -> None:
        wanted = self._new_key(moves)
        moves = shortest(moves, lambda fewer: self._new_key(fewer) == wanted)
        steps = self._steps(moves)
        at = self._new(steps)
        assert at is not None, "the peer answers differently each time"
        consequence = not all(step.agrees for step in steps[:at])
        key = key_of(steps[at])
        self._known[key] = Difference(*key, tuple(steps[: at + 1]), consequence, self._on_its_clock(moves, key))

    def _on_its_clock(self, moves: Sequence[Move], key: Key) -> bool | None:
        open_real: Callable[[int], PeerCache] | None = getattr(self._peer, "real_cache", None)
        if open_real is None or all(move.call != "pass_time" for move in moves):
            return None
        return any(not step.agrees and key_of(step) == key for step in self._steps(moves, open_real(ROOM)))

    def coarse(self) -> tuple[Coarse, ...]:
        """Words that were seen in two meanings, with a run for each."""
        found = []
        for (call, word), meanings in sorted(self._meanings.items()):
            if len(meanings) > 1 and call in self._peer.means:
                shown = [(meaning, self._ending(call, word, meaning, moves)) for meaning, moves in meanings.items()]
                found.append(Coarse(call, word, tuple(sorted(shown))))
        return tuple(found)

    def _ending(self, call: str, word: str, meaning: str, moves: Sequence[Move]) -> tuple[str, ...]:
        """The fewest of `moves` that end with this word in this meaning."""

        def ends(fewer: Sequence[Move]) -> bool:
            steps = self._steps(fewer)
            last = steps[-1] if steps else None
            return last is not None and (last.move.call, last.said, last.expected) == (
                call,
                (word,),
                (frozenset({meaning}),),
            )

        return tuple(str(move) for move in shortest(moves, ends))


def shortest(moves: Sequence[Move], holds: Callable[[Sequence[Move]], bool]) -> list[Move]:
    """Without every move that can be left out, the last ones first, until none can."""
    kept, before = list(moves), -1
    while len(kept) != before:
        before = len(kept)
        for at in reversed(range(before)):
            fewer = kept[:at] + kept[at + 1 :]
            if holds(fewer):
                kept = fewer
    return kept


def key_of(step: Step) -> Key:
    """Differences with one key are one: contents, counts and how often a batch says it do not tell them apart."""
    call, expected, said = step.move.call, step.expected_text, step.said_text
    if said.startswith("raises "):
        return call, expected, said
    if call == "read":
        return call, "what was written", "something else"
    if call == "used":
        more = int(said.split()[0]) > int(expected.split()[0])
        return call, "what is held", "more than is held" if more else "less than is held"
    if len(set(step.move.keys)) < len(step.move.keys):
        return call, "a word for each time that a key is named", "one for all"
    return call, expected, said.partition(" (")[0]
