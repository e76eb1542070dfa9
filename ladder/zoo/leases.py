"""Mutants of leases, holds and what they protect (groups F and G)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard, safe

_L1 = "kvcore.l1:L1Cache"
_PREFETCH = "kvcore.prefetch:PrefetchController"
_WRITEBACK = "kvcore.writeback:WritebackController"
_CLIENT = "kvcore.service.scheduler_client:SchedulerClient"

MUTANTS = (
    bug(
        "lookup_ends_without_giving_anything_back",
        "F",
        "the session is forgotten, its job and leases are not; they block room until their deadline (R24, R33)",
        "leases",
        Edit("kvcore.session:SessionTable._drop_lookup", "    job.cancel()\n    self._release_owner(owner)\n", ""),
    ),
    safe(
        "lease_deadline_is_not_watched",
        "G",
        "a reader that has vanished keeps its leases when their time is over (R31)",
        "the session, which dies of idleness and gives everything back",
        Edit(
            f"{_PREFETCH}._answer",
            "job.timer = DeadlineTimer(self._loop, self._clock, job.lease_deadline_ns, lambda: self._expire(job))",
            "pass",
        ),
    ),
    bug(
        "leases_end_neither_with_the_lookup_nor_in_time",
        "F",
        "a lookup gives nothing back when it ends, and its leases have no deadline either (R24, R31)",
        "leases liveness memory",
        Edit("kvcore.session:SessionTable._drop_lookup", "    job.cancel()\n    self._release_owner(owner)\n", ""),
        Edit(
            f"{_PREFETCH}._answer",
            "job.timer = DeadlineTimer(self._loop, self._clock, job.lease_deadline_ns, lambda: self._expire(job))",
            "pass",
        ),
    ),
    hard(
        "reaped_worker_loses_its_holds",
        "G",
        "a worker that is only silent is treated as a dead one, and its copies go on into memory of others (R31, R35)",
        "bytes visibility memory output",
        Edit(
            "kvcore.service.workers:WorkerDesk.reap", "give_up_holder(worker.holder)", "release_holder(worker.holder)"
        ),
        note="no seed meets a silent worker that goes on when its memory is reused: tests/sim/test_reaping.py does",
    ),
    bug(
        "proven_death_is_not_heard",
        "G",
        "nobody ends the holds of a worker that has died; its memory drains for ever (R31)",
        "leases memory liveness",
        Edit("kvcore.service.workers:WorkerDesk.died", "    worker = self._workers.get(name)\n", "    worker = None\n"),
    ),
    safe(
        "unneeded_chunks_stay_leased_until_settled",
        "F",
        "leases behind the greatest servable length are kept when the lookup answers (R22)",
        "settle, release and the lease deadline, each of which gives back all that is not needed",
        Edit(f"{_PREFETCH}._answer", "    self._end_leases(job, tuple(row >> best << best for row in job.held))\n", ""),
    ),
    bug(
        "one_end_takes_every_readers_lease",
        "F",
        "pins have no owner: the end of one request takes those of the others on its chunks (R26, S05)",
        "leases crash server prefix bytes",
        Edit("kvcore.leases:LeaseTable.release_owner", "slot.readers -= len(batches)", "slot.readers = 0"),
    ),
    bug(
        "late_locks_are_not_returned",
        "F",
        "a lookup answers the store's late reply with nothing; the locks it took stay (R24, R37)",
        "plan liveness",
        Edit(f"{_PREFETCH}._ask", "pump.unlock([keys[position] for position in bitmap.bits(bits)])", "pass"),
    ),
    bug(
        "locks_of_dropped_loads_are_not_returned",
        "F",
        "a load that is given up before it begins gives back its bytes and not the lock at its source (R22, R24)",
        "plan liveness",
        Edit("kvcore.loads:LoadTable.drop", "    self._pumps[loads[0].adapter].unlock(keys)\n", ""),
    ),
    bug(
        "unused_locks_are_not_returned",
        "F",
        "what a lookup locked in L2 and does not load stays locked (R22)",
        "plan liveness",
        Edit(
            f"{_PREFETCH}._plan",
            """\
    for pump, rows in zip(self._pumps, made.unlocks, strict=False):
        pump.unlock(job.cells.keys(rows))
""",
            "",
        ),
    ),
    bug(
        "retried_stores_keep_their_lease",
        "F",
        "a write-back that is tried again takes a new lease and keeps the old one (R26)",
        "leases liveness",
        Edit(f"{_WRITEBACK}._end", "[item.key for item in batch.items]", "[item.key for item in over]"),
    ),
    hard(
        "copied_objects_can_be_evicted",
        "F",
        "an object enters the eviction order with its last lease, although it is still being copied (R27)",
        "crash memory server bytes",
        Edit(f"{_L1}._unread", "if not slot.temporary and not slot.holds]", "if not slot.temporary]"),
    ),
    bug(
        "one_of_a_batch_is_not_protected",
        "F",
        "the lock walks the matched chunks and leaves out the last one (R27)",
        "crash memory server",
        Edit(
            f"{_L1}._lease",
            "[slot for slot in fresh if not slot.holds]",
            "[slot for slot in fresh if not slot.holds][:-1]",
        ),
    ),
    hard(
        "copied_object_never_becomes_evictable",
        "F",
        "the end of a copy does not bring the object back into the eviction order (R26, R57)",
        "memory server crash",
        Edit(
            f"{_L1}._quiet",
            "    self._order.add([slot for slot in reversed(slots) if slot.state is _RESIDENT and not slot.readers])\n",
            "",
        ),
    ),
    bug(
        "draining_memory_is_never_freed",
        "K",
        "an object that was removed under a copy keeps its memory when the copy has ended (R57)",
        "memory liveness",
        Edit(f"{_L1}.unhold", "if not slot.holds:", "if not slot.holds and slot.state is _RESIDENT:"),
    ),
    safe(
        "late_release_hits_the_next_lookup",
        "G",
        "a release is for the session, whichever lookup it was meant for (R32, R37, R40)",
        "the order of one connection, and that each request is executed at most once",
        Edit(
            "kvcore.session:_covers",
            "lookup.connection == connection and lookup.epoch <= epoch",
            "lookup.connection == connection",
        ),
    ),
    hard(
        "store_deadline_frees_what_is_being_written",
        "H",
        "giving up a write-back ends its hold, though the store still reads the bytes (R35)",
        "bytes leases memory visibility",
        Edit(
            f"{_WRITEBACK}._give_up",
            "    self._end(batch, batch.items)\n",
            '    self._l1.unhold(f"l2:{batch.lane.pump.name}", batch.slots)\n    self._end(batch, batch.items)\n',
        ),
        note="no seed meets memory reused before a hung store reads it: tests/sim/test_writeback.py does",
    ),
    safe(
        "read_without_a_hold",
        "G",
        "a copy out of the cache is protected by its lease alone (R27, R30)",
        "the lease, and the look at it after the copy: bytes whose lease ran out on the way are thrown away",
        Edit(f"{_L1}.hold_read", "    self._holds.take(holder, [slot for slot in slots if slot is not None])\n", ""),
    ),
    hard(
        "read_without_a_lease",
        "G",
        "a copy begins on whatever is resident, although the reader's lease has run out (R30, R33)",
        "visibility",
        Edit(
            f"{_L1}.hold_read",
            "slots.append(slot if slot is not None and self._leases.holds(owner, slot) else None)",
            "slots.append(slot)",
        ),
        planes=("clock",),
        note="none of 200 seeds sees it as they are drawn now (2026-11-30); its recorded case is of an older draw",
    ),
    hard(
        "late_store_keeps_its_memory",
        "H",
        "a store that was given up is reported after all, and nobody ends its hold (R35)",
        "leases memory liveness",
        Edit(
            f"{_WRITEBACK}._submit",
            '        self._tracer.event("writeback.late", lane.pump.name, len(answers))\n        self._let_go(batch)\n',
            '        self._tracer.event("writeback.late", lane.pump.name, len(answers))\n',
        ),
    ),
)
