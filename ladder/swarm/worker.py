"""Worker processes of a swarm: each runs ranges of seeds and sends one `Record` per seed.

Theory of operation
-------------------
    parent --(first, count)--> worker --Record, Record, ...--> parent --(first, count)--> ... --None--> worker ends

One pipe per worker, in order. So when a worker dies, or says nothing for `SILENCE_S`, the parent knows at which seed:
the one after the last record. That seed is a failure of its own ("worker"), and a new process goes on behind it.

Workers are spawned, not forked: a fork copies threads' locks, and a fresh interpreter is what a user reproduces with.
Real time is used here and nowhere below: it bounds a seed, and decides nothing inside it.

The parent holds the processes and ends them; a record is a value.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.config_kinds import config_kinds
from kvcore.ladder.swarm.draw import draw_case
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Finding, Outcome

BATCH = 20
SILENCE_S = 300.0
TWICE_EVERY = 100
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Task:
    """What every seed of a swarm has in common. None: no restriction."""

    planes: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    mutant: str = ""
    transfer: str = ""  # who copies KV; "": drawn

    @property
    def restricted(self) -> bool:
        """Seeds do not draw everything that there is."""
        return self.planes is not None or self.kinds is not None or bool(self.transfer)

    def case(self, seed: int) -> Case:
        return draw_case(seed, self.planes, self.kinds, self.mutant, self.transfer)


class Record(msgspec.Struct):
    """What the swarm keeps of one seed. `failed`: the whole outcome, where something was found."""

    seed: int
    trace_hash: str = ""
    enabled: dict[str, int] = {}
    fired: dict[str, int] = {}
    marks: dict[str, int] = {}
    bytes_checked: int = 0
    loads_verified: int = 0
    tokens_compared: int = 0
    converge_ns: int = -1
    share_loss: float = -1.0
    cpu_s: float = 0.0
    ran_twice: bool = False
    failed: Outcome | None = None


def run_seed(seed: int, task: Task, run: Callable[[Case], Outcome] = run_case) -> Record:
    """One seed; one in a hundred runs twice, and must leave the same trace."""
    case = task.case(seed)
    outcome = run(case)
    cpu_s = outcome.cpu_s
    twice = seed % TWICE_EVERY == 0
    if twice:
        again = run(case)
        cpu_s += again.cpu_s
        if again.trace_hash != outcome.trace_hash:
            text = f"two runs of one seed left the traces {outcome.trace_hash} and {again.trace_hash}"
            outcome.findings.append(Finding("determinism", outcome.time_ns, text))
    enabled, fired = config_kinds(case.config, outcome)
    return Record(
        seed,
        outcome.trace_hash,
        outcome.enabled | enabled,
        outcome.fired | fired,
        outcome.marks,
        outcome.bytes_checked,
        outcome.loads_verified,
        outcome.tokens_compared,
        outcome.converge_ns,
        outcome.share_loss,
        cpu_s,
        twice,
        outcome if outcome.findings else None,
    )


def planted(mutant: str) -> AbstractContextManager[Any]:
    """The zoo's bug of that name while the context lasts; "" is none."""
    if not mutant:
        return nullcontext()
    from kvcore.ladder.zoo.planted import planted as plant  # imports this package

    return plant(mutant)


def work(pipe: Connection, task: Task) -> None:
    """The life of a worker process."""
    encoder = msgspec.msgpack.Encoder()
    gc.freeze()  # what the modules made is never garbage
    gc.disable()  # a run would look for garbage when it begins and when it ends; here this is done once per range
    try:
        with planted(task.mutant):
            while (given := pipe.recv()) is not None:
                first, count = given
                for seed in range(first, first + count):
                    pipe.send_bytes(encoder.encode(run_seed(seed, task)))
                gc.collect()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the parent has gone, or wants to


class _Worker:
    """The parent's end of one worker."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()
        self.next_seed = 0
        self.end_seed = 0
        self.heard_s = time.monotonic()

    def give(self, first: int, count: int) -> None:
        self.next_seed, self.end_seed = first, first + count
        self.heard_s = time.monotonic()
        self.pipe.send((first, count))

    def take(self) -> Record | None:
        """The next record; None: the process has died."""
        try:
            record = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Record)
        except (EOFError, OSError):
            return None
        self.next_seed = record.seed + 1
        self.heard_s = time.monotonic()
        return record

    def join(self) -> bool:
        """Whether the process has ended."""
        self.process.join(_PATIENCE_S)
        return not self.process.is_alive()

    def end(self, *, kill: bool = False) -> int | None:
        """Its exit status."""
        if not kill:
            with suppress(OSError):
                self.pipe.send(None)
            self.join()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        return self.process.exitcode


def run_parallel(ranges: Iterator[tuple[int, int]], task: Task, jobs: int) -> Iterator[Record]:
    """Records in the order in which they come. `ranges` are taken one by one, whenever a worker has nothing to do."""
    workers: list[_Worker] = []
    try:
        for given in islice(ranges, jobs):
            workers.append(_Worker(task))
            workers[-1].give(*given)
        while workers:
            ready = wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                if worker.pipe in ready:
                    record = worker.take()
                elif time.monotonic() - worker.heard_s > SILENCE_S:
                    record = None
                else:
                    continue
                if record is None:
                    record = _replace(workers, worker, task)
                yield record
                _keep_busy(workers, record.seed + 1, ranges)
    finally:
        for worker in workers:
            worker.end(kill=True)


def _keep_busy(workers: list[_Worker], next_seed: int, ranges: Iterator[tuple[int, int]]) -> None:
    """Whoever has come to the end of its range gets the next one, or may go."""
    for worker in list(workers):
        if worker.next_seed == worker.end_seed == next_seed:
            given = next(ranges, None)
            if given is not None:
                worker.give(*given)
            else:
                worker.end()
                workers.remove(worker)


def _replace(workers: list[_Worker], worker: _Worker, task: Task) -> Record:
    """The seed that it was at has failed; a new process goes on behind it."""
    seed = worker.next_seed
    what = "died" if worker.join() else f"said nothing for {SILENCE_S:g} s"
    status = worker.end(kill=True)
    workers[workers.index(worker)] = heir = _Worker(task)
    heir.next_seed, heir.end_seed = seed + 1, worker.end_seed
    if heir.next_seed < heir.end_seed:
        heir.give(heir.next_seed, heir.end_seed - heir.next_seed)
    text = f"the process that ran seed {seed} {what} (exit status {status})"
    return Record(seed, failed=Outcome(task.case(seed), [Finding("worker", 0, text)]))
