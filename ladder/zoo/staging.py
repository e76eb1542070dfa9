"""Mutants of writing into the cache: reservation, publication, the loser of two writers (groups E, G and K)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard, safe

_L1 = "kvcore.l1:L1Cache"
_LOADS = "kvcore.loads:LoadTable"

MUTANTS = (
    bug(
        "all_granted_cells_are_published",
        "E",
        "a commit publishes what was granted, whatever the writer says of it (R19)",
        "bytes",
        Edit("kvcore.service.workers:WorkerDesk.commit", "if granted and done >> i & 1]", "if granted]"),
        Edit("kvcore.service.workers:WorkerDesk.commit", "if granted and not done >> i & 1]", "if not granted]"),
    ),
    bug(
        "failed_prefetch_is_published_and_deleted",
        "E",
        "cleaning up ends the write first and deletes then; between the two it can be read (R20)",
        "visibility bytes",
        Edit(
            f"{_LOADS}._fail",
            "    self._l1.abort_write(loads[0].tag, [load.key for load in loads])\n",
            "    self._l1.finish_write(loads[0].tag, [load.key for load in loads])\n"
            "    self._l1.delete([load.key for load in loads])\n",
        ),
    ),
    bug(
        "expired_reservation_can_be_finished",
        "E",
        "a reservation that is being written is spared when it runs out, and is published late (R21)",
        "visibility",
        Edit(
            "kvcore.l1_staging:Staging.expire",
            "if slot.lease is batch]",
            "if slot.lease is batch and not slot.holds]",
        ),
        Edit("kvcore.l1_staging:Staging.expire", "        assert not batch.live\n", ""),
    ),
    bug(
        "second_writer_is_never_freed",
        "G",
        "the loser of two writers is told so, and its buffer is forgotten (R29)",
        "memory",
        Edit(f"{_L1}._lose", "    self._leave(lost, Event.DISCARD)\n", ""),
    ),
    bug(
        "second_writer_replaces_the_first",
        "G",
        "the last writer of a key wins, also over an object that is being read (R29)",
        "memory leases crash server",
        Edit(
            f"{_L1}._publish",
            "            if settle(key, slot) is slot:\n",
            "            self._resident[key] = slot\n            if settle(key, slot) is slot:\n",
        ),
    ),
    hard(
        "loser_reads_without_a_lease",
        "G",
        "a prefetch that comes second is told that it may read what came first, and gets no lease on it (R29)",
        "leases prefix",
        Edit(
            f"{_L1}._lose",
            "        self._lease(owner, winners, deadline_ns)\n",
            "        pass\n",
        ),
    ),
    safe(
        "published_under_an_open_hold",
        "G",
        "a write is published although a copy into it is still open (R29)",
        "the storage, which ends the hold before it publishes, and the worker, which commits after its copies",
        Edit(f"{_L1}._publish", "elif slot.holds:", "elif False:"),
    ),
    bug(
        "aborted_staging_stays_counted",
        "K",
        "bytes of aborted writes are not taken off the staging bytes (R52)",
        "memory crash",
        Edit(f"{_L1}.abort_write", "    self._staging.end(tag, given_up)\n", ""),
    ),
    bug(
        "removed_bytes_stay_counted",
        "K",
        "what is evicted or deleted is not taken off the resident bytes (R52)",
        "memory",
        Edit(
            f"{_L1}._forget",
            "    self._counters.bytes_resident -= sum([slot.extent for slot in slots])\n",
            "",
        ),
    ),
    bug(
        "free_memory_is_not_joined_again",
        "K",
        "a range that comes back is not joined with its right neighbour; large objects find no room (R57)",
        "memory",
        Edit(
            "kvcore.allocator:Allocator._join", "    if after is not None:\n", "    if after is not None and False:\n"
        ),
    ),
)
