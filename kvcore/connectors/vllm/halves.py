"""How the halves of one engine's connector are put together, whatever their clients talk to.

    scheduler_half    the core's scheduler side, with the admission that the settings ask for
    worker_half       the core's worker side; its loads are timed for that admission, its stores noted for who wants it
    PageMover         the copy engine that a worker's registration has chosen, until the next one or the end

A cache in the process (`host.py`) and running servers (`sides.py`) differ in clients and clocks, and in nothing here.

Who holds: the engine's side, all of it. Who frees: the side, by `PageMover.close` when it leaves; the others hold
nothing.
"""

from __future__ import annotations

from typing import cast

from kvcore.admission import Limits
from kvcore.connectors.measured import LoadIfItPays
from kvcore.connectors.scheduler import SchedulerConnector, SchedulerConnectorConfig
from kvcore.connectors.vllm.hashes import BlockHasher
from kvcore.connectors.vllm.moving import Moving
from kvcore.connectors.vllm.store_notes import NotedStores
from kvcore.connectors.worker import WorkerConnector
from kvcore.groups import CacheLayout
from kvcore.ports import Clock, CopyEngine
from kvcore.service.client import SchedulerClient, WorkerClient


def scheduler_half(
    layout: CacheLayout,
    hasher: BlockHasher,
    client: SchedulerClient,
    clock: Clock,
    limits: Limits | None,
    *,
    load_async: bool,
    load_failures_max: int,
    session_prefix: str = "",
) -> SchedulerConnector:
    """`limits`: of an admission that loads what pays; None: everything is loaded."""
    config = SchedulerConnectorConfig(load_async, load_failures_max, session_prefix, steps_end_with_reports=False)
    admission = None if limits is None else LoadIfItPays(layout, clock, limits)
    return SchedulerConnector(layout, hasher, client, config, admission)


def worker_half(
    layout: CacheLayout, rank: int, client: WorkerClient, clock: Clock, limits: Limits | None, *, noted: bool
) -> tuple[WorkerConnector, NotedStores | None]:
    """`noted`: somebody wants to hear of its stores, from the second value."""
    notes = NotedStores(client) if noted else None
    timed = None if limits is None else clock
    return WorkerConnector(layout, rank, cast(WorkerClient, notes or client), clock=timed), notes


class PageMover:
    """See the module text. Used on the side's loop."""

    def __init__(self) -> None:
        self.device: CopyEngine | None = None

    def take(self, chosen: Moving) -> Moving:
        """The copy engine of an earlier registration ends."""
        self.close()
        self.device = chosen.device
        return chosen

    def close(self) -> None:
        if self.device is not None:
            self.device.close()
            self.device = None
