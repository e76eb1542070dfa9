"""The server's desk for workers: stores and reads that are open, and in whose name. Synchronous.

Theory of operation
-------------------
A worker is known by a name that is unique for its process life; its I/O holds belong to the holder `worker:<name>`.

    worker  (none) --REGISTER--> present --something open, not a word for `silence_ns`--> reaped --REGISTER--> present
            reaped --all of its copies have ended--> (none)
            any --UNREGISTER--> (none)          any --death proven--> dead: this name never registers again
    store   (none) --STORE--> open --COMMIT | ABORT | death--> (none)
    read    (none) --RETRIEVE--> open --LOAD_DONE of its last cell | death--> (none)

1. STORE reserves staging and an I/O hold for the cells of one batch, under a tag the worker chose before it asked. If
   the reply is lost the worker can still say ABORT(tag). A tag that is open cannot be used again.
2. COMMIT publishes the cells whose bytes are complete and aborts the other granted ones. ABORT gives up all of them.
   Both say that the worker's copies have ended; nothing else does, except its proven death.
3. RETRIEVE takes I/O holds on cells that the session's lookup holds under lease, under a ticket number of the worker.
   LOAD_DONE names the cells whose copies have ended; hold and lease end together. The answer RELEASED says that the
   bytes were protected for the whole copy: the slot still has the generation that was granted.
4. `died` is for proven death (the process is gone: its copies cannot write any more). `leave` is the worker's own word
   that no copy is running.
5. A worker that is only silent is reaped: what it has staged is aborted and will never be published, the leases of what
   it reads end. Its holds stay, because its copies may still run: that memory drains until COMMIT, ABORT or LOAD_DONE
   come after all, or its death is proven. Until it registers again, anything it says is answered with "unknown worker".
   A worker with nothing open is not looked for: there is nothing to give back. It is forgotten when room is needed.

Who holds: L1, for the holder. Who announces: COMMIT, ABORT, LOAD_DONE. Who frees: the storage, when it hears of them.

Rejected: identifying a worker by its transport identity (it changes with every reconnect); closing reads by key (two
reads of one key by one worker would close each other's); a time-out that ends holds (the copy may still be running);
letting a dead worker's name register again (its last messages may arrive after the proof of its death).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.leases import Owner
from kvcore.memory import Slot
from kvcore.service.protocol import Slots


class WorkerStorage(Protocol):
    """What the desk needs of `Storage`."""

    def reserve_store(
        self, tag: str, holder: str, keys: Sequence[ObjectKey], sizes: Sequence[int], deadline_ns: int | None
    ) -> tuple[list[Answer], list[Slot | None]]: ...

    def commit_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]: ...

    def abort_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]: ...

    def open_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]: ...

    def close_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]: ...

    def give_up_holder(self, holder: str) -> int: ...

    def release_holder(self, holder: str) -> int: ...


@dataclass(frozen=True, slots=True)
class _OpenStore:
    keys: tuple[ObjectKey, ...]
    granted: tuple[bool, ...]


@dataclass(slots=True)
class _OpenRead:
    """`slots[i]` is the granted slot and its generation at that moment; None: not granted, or closed."""

    owner: Owner
    keys: tuple[ObjectKey, ...]
    slots: list[tuple[Slot, int] | None]


class _Worker:
    """What one worker has open."""

    __slots__ = ("heard_ns", "holder", "name", "rank", "reading", "reads", "reaped", "stores")

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.heard_ns = 0
        self.reaped = False
        self.holder = f"worker:{name}"
        self.rank = rank
        self.stores: dict[str, _OpenStore] = {}
        self.reads: dict[int, _OpenRead] = {}
        self.reading: dict[Owner, dict[ObjectKey, None]] = {}  # every cell that some ticket has open

    @property
    def busy(self) -> bool:
        return bool(self.stores or self.reads)


class WorkerDesk:
    """See the module text."""

    def __init__(
        self, storage: WorkerStorage, *, ranks: int, workers_max: int, open_per_worker_max: int, silence_ns: int
    ) -> None:
        if silence_ns <= 0:
            raise CallerError(f"silence_ns must be positive, not {silence_ns}")
        self._storage = storage
        self._ranks = ranks
        self._workers_max = workers_max
        self._open_per_worker_max = open_per_worker_max
        self._silence_ns = silence_ns
        self._workers: dict[str, _Worker] = {}  # reaped ones included; longest silent first
        self._watched: dict[str, _Worker] = {}  # present and with something open; longest silent first
        self._dead: dict[str, None] = {}  # the last ones
        self.reaped = 0

    @property
    def workers(self) -> tuple[str, ...]:
        """Those that are present."""
        return tuple(name for name, worker in self._workers.items() if not worker.reaped)

    @property
    def reaped_open(self) -> int:
        """Reaped workers whose copies have not all ended."""
        return sum(worker.reaped for worker in self._workers.values())

    @property
    def stores_open(self) -> int:
        return sum(len(worker.stores) for worker in self._workers.values())

    @property
    def reads_open(self) -> int:
        return sum(len(worker.reads) for worker in self._workers.values())

    def register(self, name: str, rank: int, now_ns: int) -> bool:
        """False: no room for another worker. Again under the same name and rank: it was heard, nothing else changes."""
        if rank >= self._ranks:
            raise CallerError(f"rank {rank} does not exist: the layout has {self._ranks} ranks")
        if name in self._dead:
            raise CallerError(f"worker {name!r} is dead: a new process needs a new name")
        worker = self._workers.get(name)
        if worker is None:
            if not self._make_room(now_ns):
                return False
            worker = self._workers[name] = _Worker(name, rank)
        if worker.rank != rank:
            raise CallerError(f"worker {name!r} is rank {worker.rank}, not {rank}: names must be unique")
        worker.reaped = False
        self.heard(name, now_ns)
        return True

    def _make_room(self, now_ns: int) -> bool:
        """For one more worker. One that has been silent too long and has nothing open is forgotten for it."""
        present = [worker for worker in self._workers.values() if not worker.reaped]
        if len(present) < self._workers_max:
            return True
        for worker in present:
            if not worker.busy and worker.heard_ns + self._silence_ns <= now_ns:
                del self._workers[worker.name]
                return True
        return False

    def knows(self, name: str) -> bool:
        """False: it is not registered (any more), or it was reaped."""
        worker = self._workers.get(name)
        return worker is not None and not worker.reaped

    def heard(self, name: str, now_ns: int) -> None:
        """A message of this worker has come. Unknown names are ignored."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            assert now_ns >= worker.heard_ns, "time does not go backwards"
            worker.heard_ns = now_ns
            self._workers[name] = worker
            self._file(worker)

    def _file(self, worker: _Worker) -> None:
        """Something of this worker has changed: is its silence of interest, is it of interest at all?"""
        self._watched.pop(worker.name, None)
        if worker.reaped:
            if not worker.busy:
                self._workers.pop(worker.name, None)
        elif worker.busy:
            self._watched[worker.name] = worker

    def next_reap_ns(self) -> int | None:
        """When the worker that was silent longest is reaped, if it goes on being silent; None: nobody is watched."""
        for worker in self._watched.values():
            return worker.heard_ns + self._silence_ns
        return None

    def reap(self, now_ns: int) -> int:
        """Reap the workers that were silent too long; how many."""
        count = 0
        for worker in list(self._watched.values()):
            if worker.heard_ns + self._silence_ns > now_ns:
                break
            worker.reaped = True
            self._file(worker)
            self._storage.give_up_holder(worker.holder)
            count += 1
        self.reaped += count
        return count

    def rank_of(self, name: str) -> int:
        return self._workers[name].rank

    def leave(self, name: str) -> None:
        """The worker ends in good order: its open stores are aborted, its open reads closed."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        self._watched.pop(name, None)
        for tag, store in worker.stores.items():
            self._abort(worker, tag, store)
        for read in worker.reads.values():
            self._close(worker, read, range(len(read.keys)))

    def died(self, name: str) -> int:
        """The worker's process is proven dead. The number of holds that ended by that alone."""
        self._dead[name] = None
        while len(self._dead) > self._workers_max:
            del self._dead[next(iter(self._dead))]
        worker = self._workers.get(name)
        if worker is None:
            return 0
        self.leave(name)
        return self._storage.release_holder(worker.holder)

    # --- stores ----------------------------------------------------------------------------------------------------

    def store(
        self, name: str, tag: str, keys: Sequence[ObjectKey], sizes: Sequence[int], deadline_ns: int
    ) -> tuple[list[Answer], Slots] | None:
        """Reserve. None: too much is open already."""
        worker = self._workers[name]
        if tag in worker.stores:
            raise CallerError(f"tag {tag!r} is open already")
        if self._full(worker):
            return None
        answers, slots = self._storage.reserve_store(tag, worker.holder, keys, sizes, deadline_ns)
        assert len(answers) == len(keys)
        assert len(slots) == len(keys)
        granted = tuple(slot is not None for slot in slots)
        if any(granted):
            worker.stores[tag] = _OpenStore(tuple(keys), granted)
            self._file(worker)
        return answers, _on_wire(slots)

    def commit(self, name: str, tag: str, done: int) -> list[Answer] | None:
        """Publish the cells in `done`, abort the other granted ones. None: no such tag is open."""
        worker = self._workers.get(name)
        store = worker.stores.pop(tag, None) if worker is not None else None
        if worker is None or store is None:
            return None
        self._file(worker)
        answers = [Answer.UNKNOWN] * len(store.keys)
        good = [i for i, granted in enumerate(store.granted) if granted and done >> i & 1]
        bad = [i for i, granted in enumerate(store.granted) if granted and not done >> i & 1]
        self._fill(answers, good, self._storage.commit_store(tag, worker.holder, [store.keys[i] for i in good]))
        self._fill(answers, bad, self._storage.abort_store(tag, worker.holder, [store.keys[i] for i in bad]))
        return answers

    def abort(self, name: str, tag: str) -> list[Answer] | None:
        """Give up all granted cells. None: no such tag is open."""
        worker = self._workers.get(name)
        store = worker.stores.pop(tag, None) if worker is not None else None
        if worker is None or store is None:
            return None
        self._file(worker)
        return self._abort(worker, tag, store)

    def _abort(self, worker: _Worker, tag: str, store: _OpenStore) -> list[Answer]:
        answers = [Answer.UNKNOWN] * len(store.keys)
        positions = [i for i, granted in enumerate(store.granted) if granted]
        self._fill(
            answers, positions, self._storage.abort_store(tag, worker.holder, [store.keys[i] for i in positions])
        )
        return answers

    def _fill(self, answers: list[Answer], positions: Sequence[int], given: Sequence[Answer]) -> None:
        assert len(positions) == len(given), "an answer per key"
        for position, answer in zip(positions, given):
            answers[position] = answer

    # --- reads -----------------------------------------------------------------------------------------------------

    def retrieve(self, name: str, ticket: int, owner: Owner, keys: Sequence[ObjectKey]) -> Slots | None:
        """Hold the cells for a copy out of L1. None: too much is open already."""
        worker = self._workers[name]
        if ticket in worker.reads:
            raise CallerError(f"ticket {ticket} is open already")
        if self._full(worker):
            return None
        slots = self._open(worker, owner, keys)
        granted = [(slot, slot.generation) if slot is not None else None for slot in slots]
        if any(slot is not None for slot in slots):
            worker.reads[ticket] = _OpenRead(owner, tuple(keys), granted)
            self._file(worker)
        return _on_wire(slots)

    def _open(self, worker: _Worker, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        """A cell is open under one ticket at a time: the end of one read must never end the hold of another."""
        open_cells = worker.reading.setdefault(owner, {})
        first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in open_cells}
        fresh = sorted(first.values())
        given = self._storage.open_read(worker.holder, owner, [keys[i] for i in fresh])
        assert len(given) == len(fresh)
        slots: list[Slot | None] = [None] * len(keys)
        for i, slot in zip(fresh, given):
            slots[i] = slot
            if slot is not None:
                open_cells[keys[i]] = None
        if not open_cells:
            del worker.reading[owner]
        return slots

    def load_done(self, name: str, ticket: int, done: int) -> list[Answer] | None:
        """The copies of the cells in `done` have ended. None: no such ticket is open."""
        worker = self._workers.get(name)
        read = worker.reads.get(ticket) if worker is not None else None
        if worker is None or read is None:
            return None
        answers = self._close(worker, read, [i for i in range(len(read.keys)) if done >> i & 1])
        if all(slot is None for slot in read.slots):
            del worker.reads[ticket]
            self._file(worker)
        return answers

    def _close(self, worker: _Worker, read: _OpenRead, cells: Sequence[int]) -> list[Answer]:
        answers = [Answer.UNKNOWN] * len(read.keys)
        positions = [i for i in cells if read.slots[i] is not None]
        keys = [read.keys[i] for i in positions]
        self._fill(answers, positions, self._storage.close_read(worker.holder, read.owner, keys))
        for i in positions:
            entry = read.slots[i]
            assert entry is not None
            if entry[0].generation != entry[1]:
                answers[i] = Answer.EXPIRED
            read.slots[i] = None
            del worker.reading[read.owner][read.keys[i]]
        if positions and not worker.reading[read.owner]:
            del worker.reading[read.owner]
        return answers

    def _full(self, worker: _Worker) -> bool:
        return len(worker.stores) + len(worker.reads) >= self._open_per_worker_max


def _on_wire(slots: Sequence[Slot | None]) -> Slots:
    return [(slot.offset, slot.size, slot.generation) if slot is not None else None for slot in slots]
