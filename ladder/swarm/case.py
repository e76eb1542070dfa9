"""`Case`: one run of the simulated world, written down.

Theory of operation
-------------------
A case has a configuration, requests, explicit fault events and a schedule. It is a value: JSON and back gives an equal
one, and two equal cases give the same trace. What is left to chance is drawn from streams named by `seed`: delays and,
unless the schedule says otherwise, ties. `banner()` says all of it in a few lines.

All durations are virtual nanoseconds; all capacities are counted in chunks, where one chunk is the bytes of all its
cells on all ranks, so that a case keeps its meaning when groups or chunk size change.

Rejected: keeping the seed alone and drawing the rest anew (a changed draw would change every old case, and nothing
could be cut away); nesting the production code's own configuration classes (their defaults would leak into old cases).

Nothing is held: a case is a value.
"""

from __future__ import annotations

import msgspec

from kvcore.errors import ConfigError
from kvcore.sim.faults.kind import FaultEvent

SCHEMA = 1


class EpisodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is built. 0 in a count of chunks means "no limit"; pairs are the least and the most of a drawn delay.

    `servers` 0: in-process. `l2`: adapters in order of preference. `between_passes`: what is done between the cold pass
    and the hot one ("", "drop_l1"). `second_from_l2`: L1 is dropped before the second workload is served again.
    `fault_ns`: faults stop then, if the requests have not been served before. `clear_ns`: an operator clears L1 then,
    whatever goes on (0: never). `transfer`: who copies KV, "worker" or "server"; `copy_ns` is then the time of one
    block, and of a thousand blocks `pages_fail` cannot be copied, as if the worker's segment had been cut, until the
    faults stop.
    """

    groups: str = "full"
    ranks: int = 1
    servers: int = 0
    placement: str = "chunk"
    load_async: bool = False
    hash_mode: str = "tokens"
    # the model
    chunk_tokens: int = 8
    full_block_tokens: int = 4
    window_block_tokens: int = 4
    recurrent_block_tokens: int = 4
    window_tokens: int = 20
    model_seed: int = 1
    # the cache
    l1_chunks: int = 256
    l2: tuple[str, ...] = ("memory",)
    l2_chunks: int = 0
    policy: str = "lru"
    retain: bool = False
    skip_l1: bool = False
    weak_locks: bool = False
    prefetch_budget_chunks: int = 0
    tenant_chunks: int = 0
    load_slice_chunks: int = 0
    # deadlines of the cache
    lookup_timeout_ns: int = 40_000_000
    server_timeout_ns: int = 30_000_000
    linger_ns: int = 100_000_000
    request_timeout_ns: int = 40_000_000
    hello_interval_ns: int = 10_000_000
    resend_ns: int = 5_000_000
    resend_ns_max: int = 80_000_000
    resends_max: int = 8
    lease_ns: int = 1_000_000_000
    store_deadline_ns: int = 600_000_000
    store_attempts_max: int = 4
    store_backoff_ns: int = 2_000_000
    session_idle_ns: int = 10_000_000_000
    store_lease_ns: int = 2_000_000_000
    worker_silence_ns: int = 1_000_000_000
    close_deadline_ns: int = 5_000_000_000
    # the engine
    num_blocks: int = 256
    max_num_seqs: int = 16
    max_batched_tokens: int = 64
    engine_policy: str = "fcfs"
    prefix_cache: bool = True
    partial_hits: bool = True
    host_ahead: bool = False
    reserve_whole: bool = False
    beyond_engine: bool = False
    idle_step_ns: int = 1_000_000
    # the world
    admission: str = "always"
    transfer: str = "worker"
    copy_ns: tuple[int, int] = (10_000, 200_000)
    pages_fail: int = 0
    page_ns: tuple[int, int] = (10_000, 200_000)
    load_page_ns: tuple[int, int] = (500, 20_000)
    l2_latency_ns: tuple[int, int] = (10_000, 200_000)
    reconnect_ns: int = 0
    # the course of the episode
    between_passes: str = ""
    second_from_l2: bool = False
    fault_ns: int = 20_000_000
    clear_ns: int = 0


class CaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. Equal ids in `chunks` are equal tokens; the tail's tokens depend on `chunks` alone, so two requests
    with the same chunks share as much of their tails as both have. `time_ns` after its pass began. `items`: (offset,
    length, which one) of multimodal items in the prompt, for which caches see placeholders; what would lie beyond the
    prompt is not there."""

    request_id: str
    chunks: tuple[int, ...]
    tail_tokens: int = 0
    output_tokens: int = 2
    time_ns: int = 0
    salt: str = ""
    priority: int = 0
    items: tuple[tuple[int, int, int], ...] = ()


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How ties are broken: "random", "fifo", "priority" (with few change points) or "replay": first in, first out
    except that at tie `k` the entry at `exceptions[k]` runs."""

    kind: str = "random"
    change_points: int = 0
    exceptions: dict[int, int] = {}


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module's text. `requests` are served cold and then hot, with faults; `second` is the workload after them.

    `dead`: targets whose faults are not ended ("stays dead"). `mutant`: the bug of the zoo under which the case failed;
    whoever runs the case plants it.
    """

    seed: int
    config: EpisodeConfig
    requests: tuple[CaseRequest, ...]
    second: tuple[CaseRequest, ...] = ()
    faults: tuple[FaultEvent, ...] = ()
    schedule: Schedule = Schedule()
    dead: tuple[str, ...] = ()
    mutant: str = ""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Readable JSON, the same text for equal cases."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Case:
        """The inverse of `to_json`. Raises `ConfigError` for anything else."""
        try:
            schema = msgspec.json.decode(text, type=_SchemaOnly).schema
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"not a case: {error}") from None
        if schema != SCHEMA:
            raise ConfigError(f"the case has schema {schema}, this version reads schema {SCHEMA}")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"not a case of schema {SCHEMA}: {error}") from None

    def banner(self) -> str:
        """Everything that was drawn, for the first lines of a run."""
        config = msgspec.structs.asdict(self.config)
        defaults = msgspec.structs.asdict(EpisodeConfig())
        drawn = ", ".join(f"{name} {_plain(value)}" for name, value in config.items() if value != defaults[name])
        change = f" with {self.schedule.change_points} change points" if self.schedule.kind == "priority" else ""
        lines = [
            f"seed {self.seed}{f', mutant {self.mutant}' if self.mutant else ''}; schedule {self.schedule.kind}{change}"
            + (f" with {len(self.schedule.exceptions)} exceptions" if self.schedule.exceptions else ""),
            f"configuration: {drawn or 'all defaults'}",
            f"requests: {' '.join(map(_request_text, self.requests))}",
            f"after the faults: {' '.join(map(_request_text, self.second))}",
            *[f"fault: {event}" for event in self.faults],
        ]
        return "\n".join([*lines, f"stays dead: {', '.join(self.dead)}"] if self.dead else lines)


class _SchemaOnly(msgspec.Struct):
    schema: int


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _request_text(request: CaseRequest) -> str:
    salt = f"/{request.salt}" if request.salt else ""
    prompt = f"{','.join(map(str, request.chunks))}+{request.tail_tokens}"
    items = "".join(f" item {which} at {offset}-{offset + length}" for offset, length, which in request.items)
    return f"{request.request_id}{salt}[{prompt}>{request.output_tokens}{items}]"
