"""`Weather`: makes the events of a forecast happen to a fleet and its links.

Every event is a task: it waits until it is due, for its server to be up (events of one server come one after the
other), for its moment; then it strikes, with nothing awaited between the look at what is under way and the blow. It has
ended when what it broke can work again: a killed server runs on the same files, a stopped process goes on, a link is
clean. Only a killed engine is left to the traffic, which notices by itself and starts the next one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from kvcore.ladder.storm.fleet import TERM_SECONDS_MAX, StormFleet
from kvcore.ladder.storm.forecast import Event
from kvcore.ladder.storm.link import DOWN, UP, Link
from kvcore.ladder.storm.record import Happened, Record
from kvcore.ladder.storm.tap import Open
from kvcore.runtime.child import Child
from kvcore.sim.workload import Draws

_MOMENT_PATIENCE_S = 10.0
_TORN_RECORDS_MAX = 24
_LINK_ATTEMPTS = 4
_SLOW_PIECE_BYTES = 200
_SLOW_DELAY_S = 0.002


class Weather:
    """See the module text. `begin_s` on the loop's clock: when the storm began."""

    def __init__(self, seed: int, fleet: StormFleet, links: Sequence[Link], record: Record, begin_s: float) -> None:
        self._seed = seed
        self._fleet = fleet
        self._links = links
        self._record = record
        self._begin_s = begin_s

    async def round(self, events: Sequence[Event]) -> None:
        """Return when all have happened and all but a killed engine is whole again."""
        async with asyncio.TaskGroup() as group:
            for event in events:
                group.create_task(self._happen(event))

    async def _happen(self, event: Event) -> None:
        await asyncio.sleep(event.at_s)
        part = event.kind.partition(".")[0]
        if part == "server":
            index = event.target % len(self._links)
            async with self._fleet.server_locks[index]:
                await self._server(event, index)
        elif part == "link":
            index = event.target % len(self._links)
            async with self._fleet.server_locks[index]:
                await self._link(event, self._links[index])
        else:
            await self._engine(event)

    async def _come(self, event: Event, links: Sequence[Link]) -> bool:
        """Wait for an engine, then for the event's moment on any of these links. False: it did not come."""
        await self._fleet.engine_up.wait()
        waits = [asyncio.ensure_future(link.tap.moment(event.moment, _MOMENT_PATIENCE_S)) for link in links]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return any(wait.result() for wait in done)
        finally:
            for wait in waits:
                wait.cancel()

    def _note(self, event: Event, in_moment: bool, hit: Open, note: str = "") -> None:
        self._record.event(Happened(event, asyncio.get_running_loop().time() - self._begin_s, in_moment, hit, note))

    # -- servers

    async def _server(self, event: Event, index: int) -> None:
        link, child = self._links[index], self._fleet.servers[index]
        await self._fleet.note_damage(index)
        in_moment = await self._come(event, [link])
        if event.kind == "server.freeze":
            self._note(event, in_moment, link.tap.open())
            await self._freeze(child, event.lasts_s)
            return
        if event.kind == "server.term":
            await self._terminate(event, index, in_moment)
        else:
            child.signal(signal.SIGKILL)
            hit = link.tap.forget()
            torn = self._tear(event, index) if event.kind == "server.power" else 0
            self._note(event, in_moment, hit, f"{torn} records torn" if torn else "")
        await asyncio.sleep(event.lasts_s)
        await self._fleet.revive_server(index)

    async def _terminate(self, event: Event, index: int, in_moment: bool) -> None:
        tap = self._links[index].tap
        hit = tap.open()
        status, seconds = await self._fleet.terminate_server(index)
        tap.forget()
        self._note(event, in_moment, hit, f"exit {status} after {seconds:.1f} s")
        if status or seconds > TERM_SECONDS_MAX:
            self._record.problem(f"[liveness] a server told to end took {seconds:.1f} s and ended with {status}")

    def _tear(self, event: Event, index: int) -> int:
        """As a loss of power leaves files that nobody has flushed: too short, or of the right length and empty."""
        draws = Draws(self._seed, f"tear {event.number}")
        torn = 0
        for path in self._fleet.records(index)[:_TORN_RECORDS_MAX]:
            size = path.stat().st_size
            if draws.below(3) == 0:
                continue
            keep = draws.below(size)
            os.truncate(path, keep)
            if draws.below(2):
                os.truncate(path, size)
            torn += 1
        self._record.counts["records torn"] += torn
        return torn

    async def _freeze(self, child: Child, seconds: float) -> None:
        child.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            child.signal(signal.SIGCONT)

    # -- the engine

    async def _engine(self, event: Event) -> None:
        in_moment = await self._come(event, self._links)
        if not self._fleet.engine_up.is_set():  # somebody was faster
            in_moment = await self._come(event, self._links)
        child = self._target(event)
        hit = sum((link.tap.open() for link in self._links), Open())
        if event.kind.endswith("kill"):
            self._fleet.hit_engine(child)
            self._note(event, in_moment, hit)
        else:
            self._note(event, in_moment, hit)
            await self._freeze(child, event.lasts_s)

    def _target(self, event: Event) -> Child:
        if event.kind.startswith("worker"):
            return self._fleet.workers[event.target % len(self._fleet.workers)]
        assert self._fleet.engine is not None
        return self._fleet.engine

    # -- links

    async def _link(self, event: Event, link: Link) -> None:
        """Again, when it met an empty road: an engine may have died just before."""
        for _ in range(_LINK_ATTEMPTS):
            in_moment = await self._come(event, [link])
            hit, connections = link.tap.open(), link.passages
            effect = await _LINK_FAULTS[event.kind](link, event)
            link.heal()
            if effect:
                self._note(event, in_moment, hit, f"{connections} connections")
                return


async def _cut(link: Link, event: Event) -> bool:
    return link.cut() > 0


async def _truncate(link: Link, event: Event) -> bool:
    return await link.truncate(_MOMENT_PATIENCE_S)


async def _half(link: Link, event: Event) -> bool:
    link.swallowed = (UP, DOWN)[event.number % 2]
    before = link.counts["bytes_swallowed"]
    await asyncio.sleep(event.lasts_s)
    link.cut()
    return link.counts["bytes_swallowed"] > before


async def _slow(link: Link, event: Event) -> bool:
    link.piece_bytes, link.delay_s = _SLOW_PIECE_BYTES, _SLOW_DELAY_S
    before = link.counts["pieces_delayed"]
    await asyncio.sleep(event.lasts_s)
    return link.counts["pieces_delayed"] > before


async def _stall(link: Link, event: Event) -> bool:
    link.stall()
    await asyncio.sleep(event.lasts_s)
    return link.passages > 0


async def _refuse(link: Link, event: Event) -> bool:
    link.refusing = True
    link.cut()
    before = link.counts["refused"]
    await asyncio.sleep(event.lasts_s)
    return link.counts["refused"] > before


# Each returns when it is over; whether it had any effect.
_LINK_FAULTS = {
    "link.cut": _cut,
    "link.truncate": _truncate,
    "link.half": _half,
    "link.slow": _slow,
    "link.stall": _stall,
    "link.refuse": _refuse,
}
