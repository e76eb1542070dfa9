"""Two processes on one store, in every order: pieces of work begin, and their outcomes are delivered, as chance has it.

After every step: a load that succeeded gave bytes that were stored under this key, by whoever; what a process has
locked it neither evicts nor deletes (its deletions are watched); the sums of ledgers and activities hold. At the end,
when all work is done, every task has been answered, nothing is left, and after a last scan the ledger equals the store.
"""

from __future__ import annotations

import random

import pytest

SEEDS = range(60)
STEPS = 250
KEYS = 6


class Run:
    def __init__(self, kit, seed):
        self.kit = kit
        self.random = random.Random(seed)
        self.store = kit.store()
        self.keys = [kit.key(number, salt) for number in range(KEYS // 2) for salt in ("a", "b")]
        limits = [{}, {"capacity_bytes": kit.size_of(4, 50, "a"), "rescan_bytes": kit.size_of(2, 50, "a")}]
        self.processes = [kit.process(self.store, **self.random.choice(limits)) for _ in range(2)]
        self.pending = []  # outcomes that were not delivered yet
        self.tasks = []  # (process, kind, task, keys, buffers)
        self.locks = {process: [] for process in self.processes}
        for process in self.processes:
            self._watch_deletions(process)

    def _watch_deletions(self, process):
        inner = process.client.delete

        def delete(keys):
            held = set(self.locks[process])
            assert held.isdisjoint(keys), "a locked object was removed by its own process"
            return inner(keys)

        process.client.delete = delete

    def step(self):
        process = self.random.choice(self.processes)
        actions = [self.submit_store, self.submit_lookup, self.submit_load, self.unlock, self.delete]
        actions += [self.spoil, self.fail] + [self.work] * 8
        self.random.choice(actions)(process)
        self.take()
        for other in self.processes:
            other.adapter.check()

    def some_keys(self):
        return [self.random.choice(self.keys) for _ in range(self.random.randint(1, 4))]

    def submit_store(self, process):
        keys = self.some_keys()
        sizes = [50 if self.random.random() < 0.9 else 20 for _ in keys]
        payloads = [self.content(key, size) for key, size in zip(keys, sizes)]
        task = process.adapter.submit_store(keys, [memoryview(payload) for payload in payloads])
        self.tasks.append((process, "store", task, keys, payloads))

    @staticmethod
    def content(key, size):
        return (key.cache_salt.encode() + key.chunk_hash).ljust(size, b".")[:size]

    def submit_lookup(self, process):
        keys = self.some_keys()
        self.tasks.append((process, "lookup", process.adapter.submit_lookup_and_lock(keys), keys, None))

    def submit_load(self, process):
        keys = self.some_keys()
        buffers = [bytearray(50) for _ in keys]
        task = process.adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers])
        self.tasks.append((process, "load", task, keys, buffers))

    def unlock(self, process):
        locks = self.locks[process]
        self.random.shuffle(locks)
        keys = [locks.pop() for _ in range(min(len(locks), 2))]
        process.adapter.submit_unlock(keys)

    def delete(self, process):
        if self.random.random() < 0.3:
            process.adapter.delete(self.some_keys())

    def spoil(self, process):
        """Somebody damages or removes a record, or the store is full for a while."""
        self.store.full = self.random.random() < 0.1
        key = self.random.choice(self.keys)
        if key in self.store.records and self.random.random() < 0.5:
            record = self.store.records[key]
            self.store.records[key] = self.random.choice([b"", record[:-1], record + b"!", record[:-1] + b"?"])
        elif self.random.random() < 0.5:
            self.store.records.pop(key, None)

    def fail(self, process):
        self.store.failing = {self.random.choice(self.keys)} if self.random.random() < 0.3 else set()
        self.store.down = OSError(5, "down") if self.random.random() < 0.1 else None

    def work(self, process):
        pieces = process.hands.pieces
        if self.pending and self.random.random() < 0.5:
            self.pending.pop(self.random.randrange(len(self.pending)))()
        elif pieces and self.random.random() < 0.02:
            process.hands.break_off(self.random.randrange(len(pieces)))
        elif pieces:
            self.pending.append(process.hands.begin(self.random.randrange(len(pieces))))

    def take(self):
        stores = {process: process.adapter.pop_completed_stores() for process in self.processes}
        left = []
        for process, kind, task, keys, buffers in self.tasks:
            if kind == "store":
                result = stores[process].get(task)
            else:
                result = getattr(process.adapter, f"take_{kind}")(task)
            if result is None:
                left.append((process, kind, task, keys, buffers))
            elif kind == "lookup":
                self.locks[process] += [key for position, key in enumerate(keys) if result >> position & 1]
            elif kind == "load":
                for position, key in enumerate(keys):
                    assert not result >> position & 1 or buffers[position] == self.content(key, 50)
        self.tasks = left

    def end(self):
        self.store.failing, self.store.down, self.store.full = set(), None, False
        while self.pending:
            self.pending.pop()()
        for process in self.processes:
            process.hands.run_all()
        self.take()
        assert self.tasks == []
        for process in self.processes:
            assert process.adapter.usage().locked == len(set(self.locks[process]))
            process.adapter.submit_unlock(self.locks[process])
            self.locks[process] = []
            process.adapter.submit_lookup_and_lock([])  # opens it, if that has failed until now
            process.hands.run_all()
            assert process.adapter.usage().locked == 0
        for process in self.processes:
            process.adapter._scanner.begin()
            process.hands.run_all()
        for process in self.processes:
            process.adapter.check()
            assert process.adapter._activities._of_key == {}
            statistics = process.adapter.statistics()
            assert statistics.bytes_reserved == 0
            assert statistics.work_inflight == 0
        last = self.processes[-1].adapter
        assert set(last.keys()) == set(self.store.records)
        assert last.usage().bytes_used == sum(map(len, self.store.records.values()))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_processes_in_every_order(kit, seed):
    run = Run(kit, seed)
    for _ in range(STEPS):
        run.step()
    run.end()
