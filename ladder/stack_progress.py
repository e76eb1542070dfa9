"""What gets done in a `CacheStack` and its engine, and who waits for what, for progress watch and deadlock report.

`reading` changes whenever a request advances, a copy or a task of a store ends, a session or a lease is given back. It
does not change by polls, repeated messages, questions and timers.

`waits` says in one line each what every open lookup, staging, copy, message and store task waits for: cells, leases,
holds and bytes, which tasks alone do not show. It looks into the components' books, which is for reading only.

Nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from kvcore.connectors.worker import WorkerConnector
from kvcore.keys import ObjectKey
from kvcore.ladder.server_stack import ServerStack
from kvcore.ladder.stack import CacheStack
from kvcore.lookup_job import LookupJob, LookupState, Phase
from kvcore.sim.engine.engine import Engine
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.progress import ProgressWatch

_FIELDS = (
    "loads_planned", "cells_load_planned", "cells_store_planned", "load_failures",  # the connector
    "stores", "stores_cancelled", "loads", "loads_cancelled", "cells_stored", "cells_loaded",  # workers
    "cells_committed", "cells_closed_good",  # their clients
    "incarnation", "debts",  # connections
    "sessions", "sessions_ended", "sessions_expired", "stores_open", "reads_open", "workers",  # servers
)  # fmt: skip
_KEYS_SHOWN = 4


def reading(stack: CacheStack, engine: Callable[[], Engine]) -> Hashable:
    """Another value whenever something got done. `engine()` is the present one."""
    state = engine().statistics()
    done = [state.tokens_computed, state.tokens_generated, state.requests_finished, state.requests_aborted]
    for _, part in stack.states():
        done += [getattr(part, field) for field in _FIELDS if hasattr(part, field)]
    for server in stack.servers:
        storage = server.storage.statistics()
        done += [storage.l1.published, storage.l1.leases, storage.l1.holds, storage.prefetch.loads.loaded]
        done += [pump.outstanding for pump in storage.adapters]
        done += [storage.writeback.stored, storage.writeback.failed, storage.writeback.retried]
    return tuple(done)


def watch_progress(
    loop: SimLoop,
    findings: Findings,
    stack: CacheStack,
    engine: Callable[[], Engine],
    limit_ns: int,
    on_stuck: Callable[[str], None] | None = None,
) -> ProgressWatch:
    """A watch over the whole world, to be started; reports say who waits for what from now on."""
    loop.explanations.append(lambda: waits(stack, engine))
    return ProgressWatch(loop, findings, limit_ns, lambda: reading(stack, engine), on_stuck=on_stuck)


def waits(stack: CacheStack, engine: Callable[[], Engine]) -> Iterator[str]:
    """One line per part that waits for something or holds what others may wait for."""
    yield f"engine: {engine().scheduler.describe()}"
    yield from _of_scheduler(stack)
    for rank in range(stack.config.layout.ranks):
        yield from _of_worker(f"worker{rank}", stack.worker(rank))
    for name, state in stack.states():
        if getattr(state, "debts", 0) or getattr(state, "outstanding", 0) or getattr(state, "waiting", 0):
            yield f"{name}: {state}"
    for server in stack.servers:
        yield from _of_server(server)


def _of_scheduler(stack: CacheStack) -> Iterator[str]:
    for request_id, tracker in stack.scheduler._trackers.items():
        yield (
            f"request {request_id}: generation {tracker.generation} of session {tracker.session} is"
            f" {tracker.phase.value}{', leases may be held' if tracker.leased else ''}"
        )


def _of_worker(name: str, worker: WorkerConnector) -> Iterator[str]:
    for job in worker._jobs.values():
        copies = sum(not ticket.done for ticket in job.tickets.values())
        yield f"{name}: {job.name} is {job.stage.value}, {copies} copies have not ended"


def _of_server(server: ServerStack) -> Iterator[str]:
    prefetch = server.storage._prefetch
    for job in prefetch._jobs.values():
        yield f"{server.name}: lookup of {job.owner.session} {_of_job(server, job)}"
    for key, load in prefetch.loads.in_flight.items():
        readers = ", ".join(getattr(reader.owner, "session", "?") for reader in load.readers) or "nobody"
        yield f"{server.name}: {_cell(key)} is being loaded from {server.adapters[load.adapter].name} for {readers}"
    l1 = server.l1
    for tag, staged in l1._staging._by_tag.items():
        yield f"{server.name}: {tag} writes {_cells(list(staged))}"
    for holder, held in l1._holds._held.items():
        yield f"{server.name}: {holder} holds {_cells([slot.key for slot in held])}"
    for pump in server.storage.statistics().adapters:
        if pump.outstanding:
            yield f"{server.name}: {pump.outstanding} tasks of {pump.name} have not ended"


def _of_job(server: ServerStack, job: LookupJob) -> str:
    budget = server.storage.statistics().prefetch.budget
    if job.state is not LookupState.PENDING:
        return f"is {job.state.value} and holds {job.leases} leases until {job.lease_deadline_ns} ns"
    if job.phase is Phase.WAITING and job.grant is not None:
        free = budget.bytes_capacity - budget.bytes_used
        return f"waits for {job.grant.bytes_wanted} bytes of the budget, {free} of {budget.bytes_capacity} are free"
    if job.phase is Phase.LOOKING:
        return f"waits for the answers of {job.lookups} adapters"
    return f"waits for {_cells(list(job.joined))}"


def _cells(keys: list[ObjectKey]) -> str:
    shown = ", ".join(map(_cell, keys[:_KEYS_SHOWN]))
    return shown if len(keys) <= _KEYS_SHOWN else f"{shown} and {len(keys) - _KEYS_SHOWN} more"


def _cell(key: ObjectKey) -> str:
    return f"cell {key.object_group_id}/{key.kv_rank}/{key.chunk_hash.hex()[:8]}"
