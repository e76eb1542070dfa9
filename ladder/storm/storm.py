"""One storm: rounds of weather over traffic, a calm after each, a last replay, and the look at what is left.

    start     links, servers, engine; one batch in good weather
    round     batches go on until the round's events are over; then everything is whole again
    calm      no lease, hold, staged or quarantined byte, session or dead worker in any server; descriptors and threads
              of each server life as at its first calm
    replay    everything asked so far once more, one engine, no prefix cache of its own, no fault: right, and loaded
    end       all processes end in good order; nothing is left (segments, sockets, descriptors, threads, processes)

Bounds: `seconds` are for the rounds; they go on until all has happened that must (`record.py`), with a bound.
Limits of single waits are wide: a slow machine is no failure.

Reproduction: the seed gives the requests and the forecast, which is printed. The processes' timing is real: the same
seed does the same things to the same parts, and may meet them doing something else.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from kvcore.groups import GroupKind
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.storm.fleet import SESSION_IDLE_S, StormFleet
from kvcore.ladder.storm.forecast import DECK, SHORT_DECK, Forecast
from kvcore.ladder.storm.link import Link
from kvcore.ladder.storm.record import MUST_HAPPEN, Record
from kvcore.ladder.storm.remains import Usage, processes_left, segments_left, unrest, usage_of
from kvcore.ladder.storm.tap import Tap
from kvcore.ladder.storm.traffic import Traffic, named
from kvcore.ladder.storm.weather import Weather
from kvcore.ladder.targets.torch.messages import EngineSetup, Served
from kvcore.ladder.targets.torch.model import build_torch_model
from kvcore.service.protocol import Transfer

SETTLE_SECONDS_MAX = 60.0
USAGE_SECONDS_MAX = 20.0
CHUNK_TOKENS = 16
TINY_L1_BYTES = 1 << 16
SMALL_L1_BYTES = 1 << 20
ROOMY_L1_BYTES = 16 << 20
L2_BYTES = 4 << 20
REPLAYED = 24
REPLAY_HIT_SHARE_MIN = 0.9
IO_THREADS = 4
"""Of a server's store, which starts them as they are needed (`kvcore.service.host`)."""
_LOOKS_EVERY_S = 0.1
_LOOKS_MAX = 50
_STRAGGLERS = 3
_BAD_WORDS = ("Traceback", "our own bug", "never retrieved", "callback raised", "[bytes]")


@dataclass(frozen=True, slots=True)
class StormConfig:
    """`seconds` of rounds, at least, until every kind of `deck` has come and all has happened that must.

    After `seconds_max` what must happen is asked for all the same, the rest of the deck not; after three times that
    no round begins any more: on a busy machine a round takes longer, and meets no more.
    """

    seed: int
    cell: MatrixCell
    seconds: float
    deck: tuple[str, ...] = DECK
    seconds_max: float = 100.0
    transfer: Transfer = "worker"

    @property
    def reproduce(self) -> str:
        short = " --short" if self.deck == SHORT_DECK else ""
        copies = f" --transfer {self.transfer}" if self.transfer != "worker" else ""
        return f"kvcore storm --seed {self.seed} --cell {self.cell} --seconds {self.seconds:g}{short}{copies}"


@dataclass(slots=True)
class StormResult:
    config: StormConfig
    rounds: int
    seconds: float
    record: Record
    usage: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "fail" if self.record.problems else "pass"

    def text(self) -> str:
        """Everything a reader needs, the verdict last."""
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.record.counts.items()))
        lines = [str(happened) for happened in self.record.happened]
        lines += [f"{self.rounds} rounds in {self.seconds:.0f} s: {counts}", *self.usage]
        lines += [f"PROBLEM {problem}" for problem in self.record.problems]
        return "\n".join([*lines, f"{self.verdict}; again, though not with the same timing: {self.config.reproduce}"])


def run_storm(config: StormConfig, progress: Callable[[str], None]) -> StormResult:
    """In a loop of its own. Also looks at what this process has left over."""
    torch.set_num_threads(1)
    before = usage_of(os.getpid())
    result = asyncio.run(Storm(config, progress).run())
    for _ in range(_LOOKS_MAX):
        grown = usage_of(os.getpid()).growth_since(before)
        if not grown:
            break
        threading.Event().wait(_LOOKS_EVERY_S)  # threads that have ended are still shown for a moment
    else:
        names = sorted(thread.name for thread in threading.enumerate())
        result.record.problem(f"[leak] the driver has {grown} (threads: {', '.join(names)})")
    return result


class Storm:
    """See the module text."""

    def __init__(self, config: StormConfig, progress: Callable[[str], None]) -> None:
        cell = config.cell
        setup = EngineSetup(
            directory="",
            model=cell.groups,
            ranks=cell.ranks,
            chunk_tokens=CHUNK_TOKENS,
            seed=config.seed + 1,
            num_blocks=1024,
            load_async=cell.load_async,
            servers=(),
            placement="rank" if cell.ranks > 1 else "chunk",
            transfer=config.transfer,
        )
        layout, model = build_torch_model(setup.model, setup.ranks, chunk_tokens=CHUNK_TOKENS, seed=setup.seed)
        l1_bytes = tuple(SMALL_L1_BYTES if index % 2 else TINY_L1_BYTES for index in range(cell.servers))
        self._config = config
        self._say = progress
        self._record = Record()
        self._forecast = Forecast(config.seed, config.deck)
        self._fleet = StormFleet(setup, l1_bytes, L2_BYTES)
        self._links = [self._link(index) for index in range(cell.servers)]
        self._traffic = Traffic(config.seed, self._fleet, self._links, self._record, layout, model)
        self._layout = layout

    def _link(self, index: int) -> Link:
        """Every other one by tcp, so that both kinds of client sockets are in the storm."""
        listen = f"ipc://{self._fleet.directory}/via{index}.sock" if index % 2 == 0 else "tcp://127.0.0.1:0"
        return Link(listen, self._fleet.setup.servers[index], Tap())

    async def run(self) -> StormResult:
        begin = asyncio.get_running_loop().time()
        rounds = 0
        try:
            await self._start()
            self._say(f"started in {asyncio.get_running_loop().time() - begin:.1f} s")
            begin = asyncio.get_running_loop().time()
            weather = Weather(self._config.seed, self._fleet, self._links, self._record, begin)
            while not self._over(rounds, asyncio.get_running_loop().time() - begin):
                rounds += 1
                await self._round(weather, rounds)
            if not self._record.problems:
                await self._replay()
        except Exception:
            self._record.problem(f"[crash] the storm itself has ended: {traceback.format_exc()}")
        finally:
            await self._close()
        self._count()
        return StormResult(
            self._config, rounds, asyncio.get_running_loop().time() - begin, self._record, self._usage_lines()
        )

    def _over(self, rounds: int, seconds: float) -> bool:
        """After its time, when it has done all it must; a storm that goes on hitting nothing is one problem more."""
        if self._record.problems:
            return True
        self._count()
        most = max(self._config.seconds, self._config.seconds_max)
        must = self._record.unmet(MUST_HAPPEN)
        if must and seconds >= _STRAGGLERS * most:
            for name in must:
                self._record.problem(f"[storm] {name} has not happened in {rounds} rounds: this has proven nothing")
            return True
        unmet = must or (self._record.unmet(self._config.deck) if seconds < most else [])
        return seconds >= self._config.seconds and not unmet

    async def _start(self) -> None:
        for link in self._links:
            await link.open()
        self._fleet.via = tuple(link.address for link in self._links)
        await asyncio.to_thread(self._fleet.start)
        self._fleet.engine_up.set()
        await self._traffic.batch()
        await self._calm()

    async def _round(self, weather: Weather, number: int) -> None:
        events = self._forecast.round()
        self._say(f"round {number}: {'; '.join(map(str, events))}")
        storm = asyncio.create_task(weather.round(events))
        try:
            while not storm.done():
                await self._traffic.batch()
            await storm
        finally:
            storm.cancel()
            await asyncio.gather(storm, return_exceptions=True)
        await self._calm()

    # -- the calm

    async def _calm(self) -> None:
        """Everything is whole; a batch reaches what was broken last; then nothing may be left."""
        for link in self._links:
            link.heal()
        self._fleet.go_on()
        await self._traffic.batch()
        left = await self._fleet.settle(SETTLE_SECONDS_MAX) or await self._rested()
        if left:
            self._record.problem(f"[leases] the servers did not come to rest: {left}")
            return
        for index in range(len(self._links)):
            await self._measure(index)
            await self._fleet.note_damage(index)

    async def _rested(self) -> str:
        """Wait until sessions of dead engines have expired and the rest with them."""
        left = "nobody was asked"
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS_MAX + SESSION_IDLE_S):
                while left:
                    states = [await self._fleet.status(index) for index in range(len(self._links))]
                    found = [unrest(state, len(self._fleet.workers)) for state in states]
                    left = "; ".join(f"server {index}: {text}" for index, text in enumerate(found) if text)
                    await asyncio.sleep(_LOOKS_EVERY_S if left else 0)
        return left

    async def _measure(self, index: int) -> None:
        """Descriptors and threads, as soon as they are no more than at the first calm of this life."""
        life = self._fleet.life_of(index)
        usage = self._fleet.measure(index)
        if life.usage:
            with suppress(TimeoutError):
                async with asyncio.timeout(USAGE_SECONDS_MAX):
                    while usage.growth_since(life.usage[0], IO_THREADS):
                        await asyncio.sleep(_LOOKS_EVERY_S)
                        usage = self._fleet.measure(index)
            if grown := usage.growth_since(life.usage[0], IO_THREADS):
                self._record.problem(f"[leak] server {index} has {grown} than at its first calm")
        life.usage.append(usage)

    # -- the last pass

    async def _replay(self) -> None:
        """With room in L1: twice to have everything stored, once to find it in the files. One request at a time.

        Twice, because a damaged record is present until it is first loaded: what is stored meanwhile is not written.
        A client that was idle since its server's restart learns of it by losing one lookup or store (as in the swarm),
        so a pass that has found too little is made once more, and that one counts.
        """
        known = self._traffic.known[-REPLAYED:]
        loadable = sum(self._loadable(len(ask.prompt)) for ask in known)
        await self._fleet.give_room(ROOMY_L1_BYTES)
        for name in ("store", "mend", "replay", "replay again"):
            await self._fleet.drop_l1()
            served = [
                one for ask in known for one in await self._traffic.serve([named(ask, name)], self._traffic.roomy)
            ]
            left = await self._fleet.settle(SETTLE_SECONDS_MAX)
            if left:
                self._record.problem(f"[leases] the servers did not come to rest: {left}")
            if name == "replay" and _loaded(served) >= REPLAY_HIT_SHARE_MIN * loadable:
                break
        self._judge_replay(served, loadable)

    def _judge_replay(self, served: list[Served], loadable: int) -> None:
        if len(served) != REPLAYED:
            self._record.problem(f"[crash] {REPLAYED} requests of the last pass took {len(served)} attempts")
        loaded = _loaded(served)
        self._record.counts["chunks loaded in the last pass"] = sum(one.counts["loads_verified"] for one in served)
        self._record.counts["hit percent of the last pass"] = 100 * loaded // loadable
        if loaded < REPLAY_HIT_SHARE_MIN * loadable:
            self._record.problem(f"[hits] the last pass has loaded {loaded} of {loadable} tokens")

    def _loadable(self, tokens: int) -> int:
        """Of a prompt of which every chunk is stored. The last token is computed, with a state from a chunk's end."""
        states = any(group.kind is GroupKind.RECURRENT for group in self._layout.groups)
        whole = tokens // CHUNK_TOKENS * CHUNK_TOKENS
        return whole if whole < tokens else whole - CHUNK_TOKENS if states else whole - 1

    # -- the end

    async def _close(self) -> None:
        fleet = self._fleet
        fleet.go_on()
        logs = fleet.logs()
        for problem in await asyncio.to_thread(fleet.close):
            self._record.problem(problem)
        for link in self._links:
            await link.close()
            self._record.problems += [f"[storm] our own bug: {error!r}" for error in link.errors]
        for name, text in logs.items():
            self._read_log(name, text)
        segments = segments_left([*(life.segment for life in fleet.lives), *fleet.page_segments])
        if segments:
            self._record.problem(f"[memory] segments left: {', '.join(segments)}")
        if left := processes_left(fleet.pids, fleet.directory):
            self._record.problem(f"[processes] left: {', '.join(left)}")
        if fleet.directory.exists():
            self._record.problem("[memory] the directory is still there")
        if tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            self._record.problem(f"[tasks] left: {tasks!r:.500}")

    def _read_log(self, name: str, text: str) -> None:
        """Servers may not say anything of a bug; engines die with a traceback when one of their processes is killed."""
        words = _BAD_WORDS if name.startswith("server") else _BAD_WORDS[1:]
        for word in words:
            if word in text:
                at = text.index(word)
                self._record.problem(f"[crash] {name} says: {text[max(0, at - 300) : at + 1500]}")

    def _count(self) -> None:
        """What the links have seen so far."""
        counts, links = self._record.counts, self._links
        seen = sum((link.tap.counts for link in links), Counter[str]())
        roads = sum((link.counts for link in links), Counter[str]())
        clients = self._fleet.engines_started * (1 + self._config.cell.ranks) * len(links)
        counts["loads broken"] = seen["loads_broken"]
        counts["cells without room in L1"] = seen["cells_without_room"]
        counts["unreadable messages"] = seen["unreadable"]
        counts["clients that met another life of a server"] = sum(link.tap.reunions for link in links)
        counts["connections that came again"] = max(0, roads["accepted"] - clients)
        counts["torn records refused"] = sum(life.refused for life in self._fleet.lives)
        counts["bytes through links"] = roads["bytes"]

    def _usage_lines(self) -> list[str]:
        """Of every server life that had more than one calm."""
        return [
            f"server {life.index}: {_usage(life.usage[0])} at its first calm, {_usage(life.usage[-1])} at its "
            f"last of {len(life.usage)}"
            for life in self._fleet.lives
            if len(life.usage) > 1
        ]


def _usage(usage: Usage) -> str:
    return f"{usage.files} descriptors, {usage.threads} threads"


def _loaded(served: list[Served]) -> int:
    """Tokens that came out of the cache."""
    return sum(admission.external_tokens for one in served for admission in one.admissions)
