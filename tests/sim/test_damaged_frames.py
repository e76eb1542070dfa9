"""A request whose frame was damaged on its way is refused as unreadable; what had been granted before is still given
back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig
from kvcore.ladder.swarm.episode import Episode, run_case
from kvcore.service.protocol import Commit, EndSession, Hello, LoadDone, Retrieve, Store, read_request
from kvcore.sim.ports.network import Letter

CHUNKS = ((1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8))
FIRST = tuple(CaseRequest(f"r{index}", chunks, 1, 4) for index, chunks in enumerate(CHUNKS))
SECOND = (CaseRequest("s0", (1000, 1001), 1, 2),)


class Damage:
    """Of the requests of one type, two in three arrive with a byte too many: sometimes the repetition as well.

    Until the second workload begins, in which nothing may fail.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._episode: Episode | None = None
        self._seen = 0
        self.damaged = 0

    def __call__(self, client: str, to_server: bool, letters: Sequence[Letter]) -> Sequence[Letter]:
        assert self._episode is not None
        over = self._episode._faults_ended_ns > 0
        if over or not to_server or not isinstance(read_request(letters[0].payload), self._kind):
            return letters
        self._seen += 1
        if self._seen % 3 == 0:
            return letters
        self.damaged += 1
        return [Letter(letter.payload + b"\0", letter.delay_ns) for letter in letters]

    def watch(self, episode: Episode) -> None:
        self._episode = episode
        episode.world.network.add_rule(self)


@pytest.mark.parametrize("kind", [Commit, LoadDone, Store, Retrieve, EndSession])
def test_a_damaged_request_leaves_nothing_behind(kind: type) -> None:
    """R04, R29: neither published without its commit, nor held for ever."""
    config = EpisodeConfig(groups="full+window", servers=1, num_blocks=24, prefix_cache=False)
    damage = Damage(kind)
    outcome = run_case(Case(3, config, FIRST, SECOND), watch=damage.watch)
    assert outcome.findings == []
    assert damage.damaged > 1


def test_a_damaged_greeting_is_made_again() -> None:
    """The server could not read it, which says nothing of how the two sides are configured."""
    damage = Damage(Hello)
    outcome = run_case(Case(3, EpisodeConfig(servers=1, num_blocks=24), FIRST, SECOND), watch=damage.watch)
    assert outcome.findings == []
    assert damage.damaged > 0
    assert outcome.loads_verified > 0
