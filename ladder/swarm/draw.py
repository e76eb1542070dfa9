"""`draw_case`: everything that a seed decides about a run, before it begins.

Swarm testing (Groce et al., "Swarm testing", ISSTA 2012): a run that has a few features, each strong, finds more than
one that has all of them weakly, because features suppress each other. So each seed draws a subset of the fault kinds,
how often each comes, and a configuration in which most things are ordinary and a few are extreme.

One stream for what is built and asked ("swarm.configuration"), one for how much goes wrong ("swarm.faults"), and one
per fault kind. A new option is drawn from a stream of its own, or every old seed would change.

Pure: nothing is held, and nothing but the arguments decides.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from kvcore.errors import ConfigError
from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig, Schedule
from kvcore.ladder.swarm.setting import blocks_max
from kvcore.sim.engine.engine import default_step_time
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.faults.kind import FaultEvent, Kind, Shape
from kvcore.sim.streams import RandomStream

MS = 1_000_000
US = 1_000
CHUNKS_MAX = 8
SECOND_CHUNK_FIRST = 1_000

_GROUPS = ("full", "full", "full+window", "full+window", "full+window+recurrent")
_L2 = (("memory",), ("file",), ("memory", "file"), ("file", "memory"), ())
_TIGHTNESS_PERCENT = (100, 105, 125, 180, 400)
_KINDS_WANTED = (0, 1, 2, 4, 4, 8, 8, 12, 20)
_REPEATS = (1, 1, 2, 4)
_WEIGHTS = {
    "engine.abort_loading": 2,
    "engine.end_races_load": 4,
    "l2.key_gone": 2,
    "l2.misdirected": 2,
    "process.engine_kill": 2,
    "transport.blocked": 2,
}
"""Kinds whose moment seldom comes are drawn more often."""
_MAY_STAY_DEAD = ("transport", "l2", "process")


def draw_case(
    seed: int,
    planes: Collection[str] | None = None,
    kinds: Collection[str] | None = None,
    mutant: str = "",
    transfer: str = "",
) -> Case:
    """The case of a seed. `planes` and `kinds` restrict the faults (None: all of them; empty: none); `transfer` says
    who copies ("": that is drawn)."""
    stream = RandomStream(seed, "swarm.configuration")
    config = msgspec.structs.replace(_cache(stream), **_transfer(seed, transfer), admission=_admission(seed))
    config = msgspec.structs.replace(config, load_slice_chunks=_load_slice_chunks(seed))
    requests = _requests(stream, config)
    requests = _with_items(seed, config, requests)
    second = _of_tenants(seed, _second(stream, config))
    config = msgspec.structs.replace(config, **_engine(stream, config, requests))
    schedule = _schedule(stream)
    config = msgspec.structs.replace(config, clear_ns=_clear_ns(seed, config))
    faults, dead = _dead(seed, config, _faults(seed, config, requests, chosen_kinds(planes, kinds)))
    return Case(seed, config, requests, second, faults, schedule, dead, mutant)


# ---- the faults


def _faults(
    seed: int, config: EpisodeConfig, requests: Sequence[CaseRequest], kinds: Sequence[Kind]
) -> tuple[FaultEvent, ...]:
    """A subset of the kinds, each so often. Every kind draws from a stream of its own, so that a new kind changes no
    event of an old one."""
    if not kinds:
        return ()
    stream = RandomStream(seed, "swarm.faults")
    wanted, repeats = stream.pick(_KINDS_WANTED), stream.pick(_REPEATS)
    shape = shape_of(config, requests)
    events: list[FaultEvent] = []
    for kind in kinds:
        own = RandomStream(seed, f"swarm.fault.{kind.name}")
        if own.sample_index(len(kinds)) < wanted * _WEIGHTS.get(kind.name, 1):
            for _ in range(own.randint(1, repeats)):
                events += kind.draw(own, shape)
    return tuple(sorted(events, key=lambda event: event.at_ns))


def chosen_kinds(planes: Collection[str] | None = None, kinds: Collection[str] | None = None) -> tuple[Kind, ...]:
    """The fault kinds that the two restrictions leave. `ConfigError` for a name that does not exist."""
    known = {kind.plane for kind in CATALOGUE.values()}
    check_names("plane", planes or (), known)
    check_names("fault kind", kinds or (), CATALOGUE)
    return tuple(
        kind
        for kind in CATALOGUE.values()
        if (planes is None or kind.plane in planes) and (kinds is None or kind.name in kinds)
    )


def check_names(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Raises `ConfigError` with the nearest known name."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"there is no {what} {name!r}{hint}")


def shape_of(config: EpisodeConfig, requests: Sequence[CaseRequest]) -> Shape:
    """What the configuration has, for the kinds that draw."""
    engine = ("scheduler", *(f"worker{rank}" for rank in range(config.ranks)))
    return Shape(
        servers=max(1, config.servers),
        ranks=config.ranks,
        in_process=config.servers == 0,
        l2=config.l2,
        clients=tuple(f"{client}>server{index}" for client in engine for index in range(config.servers)),
        request_ids=tuple(request.request_id for request in requests),
        horizon_ns=config.fault_ns,
        step_ns=step_ns(config),
        load_async=config.load_async,
        groups=tuple(config.groups.split("+")),
    )


def step_ns(config: EpisodeConfig) -> int:
    """About one step of the engine."""
    return default_step_time(config.max_batched_tokens // 2, 2)


def _dead(
    seed: int, config: EpisodeConfig, faults: Sequence[FaultEvent]
) -> tuple[tuple[FaultEvent, ...], tuple[str, ...]]:
    """In one case of six something that has broken stays broken: no end for its fault.

    But not a living server that copies its workers' pages, for these: with nobody to tell it that a copy has ended, a
    worker waits to its deadline and stops, and blocks are held for good, as they must be (docs/adr/0009-who-copies.md).
    """
    stream = RandomStream(seed, "swarm.dead")
    able = [event for event in faults if event.until_ns and event.target and _may_stay_dead(event)]
    if config.transfer == "server":
        able = [event for event in able if not _silences(event)]
    if not able or not stream.chance(1, 6):
        return tuple(faults), ()
    dead = stream.pick(able)
    lasting = msgspec.structs.replace(dead, until_ns=0)
    return tuple(lasting if event is dead else event for event in faults), (dead.target,)


def _silences(event: FaultEvent) -> bool:
    """A server that lives, for its workers."""
    if event.kind.startswith("transport."):
        return not event.target.startswith("scheduler")
    return event.target.startswith("worker") or event.kind == "process.pause"


def _may_stay_dead(event: FaultEvent) -> bool:
    return event.kind.partition(".")[0] in _MAY_STAY_DEAD


# ---- the configuration


def _cache(stream: RandomStream) -> EpisodeConfig:
    """What is built: shapes, capacities, policies and deadlines."""
    servers = stream.pick((0, 1, 1, 2, 2))
    ranks = stream.pick((1, 1, 2))
    l2 = stream.pick(_L2)
    values: dict[str, Any] = {
        "groups": stream.pick(_GROUPS),
        "ranks": ranks,
        "servers": servers,
        "placement": stream.pick(("rank", "chunk")) if ranks > 1 else "chunk",
        "load_async": stream.chance(1, 2),
        "hash_mode": "engine" if stream.chance(1, 8) else "tokens",
        "model_seed": stream.randint(1, 4),
        "l2": l2,
        "policy": stream.pick(("lru", "s3fifo")),
        "retain": stream.chance(1, 4),
        "skip_l1": bool(l2) and stream.chance(1, 5),
        "weak_locks": bool(l2) and stream.chance(1, 4),
        "second_from_l2": bool(l2) and stream.chance(1, 2),
    }
    values |= _model_shape(stream)
    values |= _capacities(stream)
    values |= _deadlines(stream)
    values |= _delays(stream)
    return EpisodeConfig(**values)


def _model_shape(stream: RandomStream) -> dict[str, int]:
    chunk = stream.pick((4, 8, 8, 12, 16))
    blocks = [tokens for tokens in (2, 4, 8, 16) if chunk % tokens == 0 and 3 * tokens >= chunk]
    return {
        "chunk_tokens": chunk,
        "full_block_tokens": stream.pick(blocks),
        "window_block_tokens": stream.pick(blocks),
        "recurrent_block_tokens": stream.pick(blocks),
        "window_tokens": stream.randint(3, 3 * chunk),
    }


def _capacities(stream: RandomStream) -> dict[str, int]:
    """In chunks. Half of the caches have room for everything, some for less than one request."""
    return {
        "l1_chunks": stream.pick((128, 128, 128, stream.randint(1, 4), stream.randint(5, 12), stream.randint(13, 40))),
        "l2_chunks": stream.pick((0, 0, 0, stream.randint(1, 8), stream.randint(9, 30))),
        "prefetch_budget_chunks": stream.pick((0, 0, stream.randint(1, 4), stream.randint(5, 20))),
        "tenant_chunks": stream.pick((0, 0, 0, stream.randint(2, 20))),
    }


def _deadlines(stream: RandomStream) -> dict[str, int]:
    """All from one scale, each bent on its own. The smallest are 1/600 of production's."""
    scale_ns = stream.pick((2_000 * MS // 600, 10 * MS, 40 * MS, 40 * MS, 200 * MS, 2_000 * MS))

    def around(percent: int) -> int:
        return max(MS // 2, scale_ns * percent * stream.pick((50, 100, 100, 200)) // 10_000)

    lookup_ns = around(100)
    resend_ns = around(15)
    return {
        "lookup_timeout_ns": lookup_ns,
        "server_timeout_ns": lookup_ns * 3 // 4,
        "linger_ns": around(500),
        "request_timeout_ns": around(100),
        "hello_interval_ns": around(25),
        "resend_ns": resend_ns,
        "resend_ns_max": resend_ns * stream.pick((2, 8, 16)),
        "resends_max": stream.pick((2, 8, 8, 50)),
        "lease_ns": min(around(stream.pick((3_000, 3_000, 300, 50))), 20_000 * MS),
        "store_deadline_ns": min(around(1_500), 10_000 * MS),
        "store_attempts_max": stream.pick((1, 4, 4)),
        "store_backoff_ns": around(5),
        "session_idle_ns": min(around(stream.pick((10_000, 10_000, 1_000, 200))), 20_000 * MS),
        "store_lease_ns": min(around(stream.pick((3_000, 3_000, 300, 20))), 10_000 * MS),
        "worker_silence_ns": min(max(4 * MS, around(stream.pick((3_000, 1_000, 100)))), 10_000 * MS),
        "idle_step_ns": max(lookup_ns // 50, stream.pick((300 * US, 1_000 * US, 2_000 * US))),
    }


def _admission(seed: int) -> str:
    """Which part of what was found is promised."""
    return RandomStream(seed, "swarm.admission").pick((*["always"] * 6, "if-it-pays", "drawn"))


def _load_slice_chunks(seed: int) -> int:
    """0: production's slices, into which all that a lookup of a swarm loads fits at once."""
    return RandomStream(seed, "swarm.load slices").pick((0, 0, 1, 2))


def _clear_ns(seed: int, config: EpisodeConfig) -> int:
    stream = RandomStream(seed, "swarm.clear")
    return stream.randint(1, config.fault_ns) if stream.chance(1, 6) else 0


def _transfer(seed: int, transfer: str) -> dict[str, Any]:
    """Who copies. What only servers have is drawn for workers too, so that asking for a driver changes nothing else."""
    stream = RandomStream(seed, "swarm.transfer")
    drawn = "server" if stream.chance(1, 5) else "worker"
    copy_ns = stream.pick(((10 * US, 200 * US), (1 * US, 20 * US), (100 * US, 2 * MS)))
    pages_fail = stream.pick((0, 0, 0, 0, 20, 200))
    by_server = {"transfer": "server", "copy_ns": copy_ns, "pages_fail": pages_fail}
    return by_server if (transfer or drawn) == "server" else {}


def _delays(stream: RandomStream) -> dict[str, Any]:
    return {
        "page_ns": stream.pick(((10 * US, 200 * US), (500, 20 * US), (40 * US, 500 * US))),
        "load_page_ns": stream.pick(((500, 20 * US), (500, 20 * US), (10 * US, 200 * US))),
        "l2_latency_ns": stream.pick(((10 * US, 200 * US), (100 * US, 2 * MS), (1 * US, 20 * US))),
        "reconnect_ns": stream.pick((0, 500 * US, 4 * MS)),
        "between_passes": stream.pick(("", "drop_l1", "drop_l1")),
    }


# ---- what is asked


def _requests(stream: RandomStream, config: EpisodeConfig) -> tuple[CaseRequest, ...]:
    """Prompts grow out of each other: each shares a prefix with an earlier one, more or less often."""
    popularity = stream.pick((30, 60, 60, 90))
    salts = ["", "blue", "red"][: stream.pick((1, 1, 1, 2, 3))]
    gap_ns = stream.pick((0, 100 * US, 500 * US, 2 * MS))
    made: list[CaseRequest] = []
    next_id = 1
    for position in range(stream.randint(3, 6)):
        chunks: tuple[int, ...] = ()
        if made and stream.chance(popularity, 100):
            before = stream.pick(made).chunks
            chunks = before[: stream.randint(0, len(before))]
        added = stream.randint(0, min(4, CHUNKS_MAX - len(chunks)))
        chunks += tuple(range(next_id, next_id + added))
        next_id += added
        made.append(_request(stream, f"r{position}", chunks, config, position * gap_ns, stream.pick(salts)))
    return tuple(made)


def _request(
    stream: RandomStream, name: str, chunks: tuple[int, ...], config: EpisodeConfig, time_ns: int, salt: str
) -> CaseRequest:
    chunk = config.chunk_tokens
    tail = stream.pick((0, 1, chunk - 1, stream.randint(0, chunk - 1)))
    return CaseRequest(
        name,
        chunks,
        tail if chunks else max(1, tail),
        stream.randint(1, 4),
        time_ns,
        salt,
        stream.randint(0, 2),
    )


def _with_items(seed: int, config: EpisodeConfig, requests: tuple[CaseRequest, ...]) -> tuple[CaseRequest, ...]:
    """In one case of six an item lies somewhere in the prompts, in most of them: one of two, or the same.

    An engine's own hashes hold its items, and the simulated engine has none there.
    """
    stream = RandomStream(seed, "swarm.items")
    if config.hash_mode == "engine" or not stream.chance(1, 6):
        return requests
    offset = stream.randint(0, 2 * config.chunk_tokens)
    length = stream.randint(1, 2 * config.chunk_tokens)
    return tuple(
        msgspec.structs.replace(request, items=((offset, length, which),) if which else ())
        for request in requests
        for which in [stream.randint(0, 2)]
    )


def _second(stream: RandomStream, config: EpisodeConfig) -> tuple[CaseRequest, ...]:
    """New prompts for after the faults: few and short, so that a cache of ordinary size has room for them."""
    made: list[CaseRequest] = []
    for position in range(2):
        own = SECOND_CHUNK_FIRST + 100 * (position + 1)
        chunks = (SECOND_CHUNK_FIRST, *range(own, own + stream.randint(1, 3)))
        made.append(CaseRequest(f"second{position}", chunks, 1, 1, position * 300 * US))
    return tuple(made)


def _of_tenants(seed: int, second: tuple[CaseRequest, ...]) -> tuple[CaseRequest, ...]:
    """Whose prompts they are, in every other case."""
    stream = RandomStream(seed, "swarm.second tenants")
    if stream.chance(1, 2):
        return second
    return tuple(msgspec.structs.replace(request, salt=stream.pick(("", "green", "red"))) for request in second)


def _engine(stream: RandomStream, config: EpisodeConfig, requests: Sequence[CaseRequest]) -> dict[str, Any]:
    """Room for little more than the largest request, in most cases, so that requests preempt each other."""
    batched = max(stream.pick((16, 32, 48, 64, 128)), config.recurrent_block_tokens)
    sized = msgspec.structs.replace(config, max_batched_tokens=batched)
    return {
        "max_batched_tokens": batched,
        "num_blocks": 1 + blocks_max(sized, requests) * stream.pick(_TIGHTNESS_PERCENT) // 100,
        "max_num_seqs": stream.pick((16, 16, 4, 2)),
        "engine_policy": stream.pick(("fcfs", "fcfs", "priority")),
        "prefix_cache": stream.chance(3, 4),
        "partial_hits": stream.chance(3, 4),
        "host_ahead": stream.chance(1, 2),
        "reserve_whole": stream.chance(1, 4),
        "beyond_engine": stream.chance(1, 20),
        "fault_ns": _serving_ns(config, requests) * stream.pick((50, 80, 100)) // 100,
    }


def _serving_ns(config: EpisodeConfig, requests: Sequence[CaseRequest]) -> int:
    """About how long the two passes take: what is drawn beyond that never happens."""
    waits = 2 + len(requests) // 2  # idle steps until lookups and loads have ended
    steps = len(requests) + sum(request.output_tokens for request in requests) // 2
    return 2 * (requests[-1].time_ns + waits * config.idle_step_ns + steps * MS // 3)


def _schedule(stream: RandomStream) -> Schedule:
    choice = stream.randint(1, 100)
    if choice <= 75:
        return Schedule()
    return Schedule("priority", stream.randint(1, 5)) if choice <= 95 else Schedule("fifo")
