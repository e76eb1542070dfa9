"""Faults of plane L2: what adapters, their blocking work and their stores do to the cache.

    l2_work      a piece of blocking work is slow, hangs, is lost, or is done and reported as failed
    l2_calls     a call at the adapter's port is refused, fails, answers late or twice; locks and keys go
    l2_records   the store runs full or read-only, or gives back other bytes than it was given

Every kind works on both backends, memory and file. All but the last group stay inside what the adapter's port promises.
Stored bytes may be wrong in any way: the only legal outcome is a clean miss.

An event's target is one adapter ("server0.file"), all of a server ("server0") or all there are (""). A server that
restarts gets new adapters, which are well; what its medium holds is what it was.
"""

from __future__ import annotations

from kvcore.sim.faults.kind import Kind
from kvcore.sim.faults.l2_calls import CALL_KINDS
from kvcore.sim.faults.l2_records import RECORD_KINDS
from kvcore.sim.faults.l2_work import WORK_KINDS

KINDS: tuple[Kind, ...] = (*WORK_KINDS, *CALL_KINDS, *RECORD_KINDS)
