"""Somebody else's connector, as the rungs want to see a cache.

The rungs look behind kvcore's own connector: what is at rest, what is under lease, what was published. Of a stranger's
they see the connector interface alone. So nothing is dropped or forgotten on purpose (unless the class has the hook
`drop_near_tier()`), leases are not judged, and what *could* be loaded is what a cache that kept everything would hold.
Tokens, and every byte that a request attends to, are judged all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvcore.connectors.interface import Connector, ConnectorConfig, SchedulerSide, WorkerSide
from kvcore.connectors.views import BlockTable, Finished, RequestView, StepView
from kvcore.errors import ConfigError
from kvcore.keys import Extra
from kvcore.ladder.guarded import say
from kvcore.sim.oracles.hits import Cell
from kvcore.sim.oracles.truth import Truth

SETTLE_SECONDS = 0.1


class RefusedError(ConfigError):
    """The class did not want this configuration."""


def build(factory: Any, name: str, config: ConnectorConfig) -> Connector:
    """An object of the class, with both sides complete.

    Raises `RefusedError` if the class raised, `ConfigError` if the object is not a connector.
    """
    try:
        made = factory(config)
    except Exception as error:
        raise RefusedError(f"--connector {name} cannot be built: {say(error)}") from None
    _complain(name, "", missing(made, Connector))
    _complain(name, "scheduler", missing(_part(name, "scheduler", lambda: made.scheduler), SchedulerSide))
    for rank in range(config.layout.ranks):
        side = _part(name, f"worker({rank})", lambda rank=rank: made.worker(rank))
        _complain(name, f"worker({rank})", missing(side, WorkerSide))
    assert isinstance(made, Connector)
    return made


def missing(found: Any, protocol: Any) -> list[str]:
    """What `found` lacks to be a `protocol`."""
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    return [name for name in wanted if not hasattr(type(found), name) and not hasattr(found, name)]


def _part(name: str, what: str, get: Any) -> Any:
    try:
        return get()
    except Exception as error:
        raise ConfigError(f"--connector {name}: {what} raised {say(error)}") from None


def _complain(name: str, what: str, lacking: Sequence[str]) -> None:
    if lacking:
        where = f"its {what} has" if what else "it has"
        raise ConfigError(f"--connector {name} is no kvcore.ladder.Connector: {where} no {', '.join(lacking)}")


class WatchedScheduler:
    """Passes every call on; remembers that questions were asked, and whether an answer was an asynchronous load."""

    def __init__(self, inner: SchedulerSide) -> None:
        self._inner = inner
        self.asked = False
        self.loads_async = False

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        self.asked = True
        answer = self._inner.matched_tokens(request, local_tokens)
        self.loads_async |= bool(answer[0]) and bool(answer[1])
        return answer

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        self._inner.after_alloc(request, blocks, external_tokens)

    def build_meta(self, step: StepView) -> Any:
        return self._inner.build_meta(step)

    def preempted(self, request_id: str) -> None:
        self._inner.preempted(request_id)

    def finished(self, request: RequestView, blocks: BlockTable) -> bool:
        return self._inner.finished(request, blocks)

    def update_output(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        self._inner.update_output(finished, error_blocks)


class KnownTruth(Truth):
    """Remembers the chunk hashes of everything that was registered."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hashes: dict[bytes, None] = {}

    def register(self, name: str, tokens: Sequence[int], items: Sequence[Extra] = ()) -> list[bytes]:
        hashes = super().register(name, tokens, items)
        self.hashes.update(dict.fromkeys(hashes))
        return hashes


class StrangerCache:
    """`kvcore.ladder.rungs.Cache` around a connector of which only the interface is known."""

    def __init__(self, inner: Connector, known: Iterable[bytes]) -> None:
        self._inner = inner
        self._known = known
        self._published: frozenset[bytes] = frozenset()
        self._scheduler = WatchedScheduler(inner.scheduler)

    @property
    def scheduler(self) -> WatchedScheduler:
        return self._scheduler

    def worker(self, rank: int) -> WorkerSide:
        return self._inner.worker(rank)

    # ---- for the rungs

    async def settle(self) -> None:
        """Let time pass. After a pass, a cache that forgot nothing would hold every chunk of the workload."""
        await asyncio.sleep(SETTLE_SECONDS)
        if self._scheduler.asked:
            self._published = frozenset(self._known)

    def drop_l1(self) -> int:
        hook = getattr(self._inner, "drop_near_tier", None)
        if hook is not None:
            hook()
        return 0

    def forget(self, hashes: Sequence[bytes]) -> None:
        return None

    def ever_published(self, cell: Cell, salt: str) -> bool:
        return cell[2] in self._published

    def held(self, request_id: str) -> tuple[Collection[Cell], int] | None:
        return None

    def left_held(self, request_id: str) -> str:
        return ""

    def lookup_of(self, request_id: str) -> int:
        return -1

    def stores_inflight(self, request_id: str) -> int:
        return 0

    def counters(self) -> dict[str, int]:
        return {}
