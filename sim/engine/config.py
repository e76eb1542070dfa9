"""What an engine start is told, and what it reports about itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique

from kvcore.errors import ConfigError


@unique
class Policy(Enum):
    """Order of the waiting queue and choice of the preemption victim."""

    FCFS = "fcfs"  # victim: the last of `running`
    PRIORITY = "priority"  # victim: the greatest (priority, arrival)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Block 0 is the null block, so `num_blocks - 1` blocks are usable.

    host_ahead: `save(layer)` is called when the layer has been submitted, not when it has been computed.
    poison: fill blocks that leave the pool with a pattern, so that what nobody wrote is seen when read.
    partial_hits: a whole prompt found locally is used up to n-1, inside a block that is then copied, not shared.
    reserve_whole: nobody is admitted whose whole sequence does not fit into the free blocks (vLLM's default). Off, more
        is admitted than can stay, and more is preempted.
    beyond_engine: more hostile than the real one: a step that preempted still admits, so that a victim can come back
    at once into blocks its own stores still read.
    """

    num_blocks: int
    max_num_seqs: int = 16
    max_batched_tokens: int = 128
    policy: Policy = Policy.FCFS
    prefix_cache: bool = True
    partial_hits: bool = True
    poison: bool = True
    host_ahead: bool = False
    reserve_whole: bool = False
    beyond_engine: bool = False
    idle_step_ns: int = 50_000

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError(f"num_blocks is {self.num_blocks}: a null block and at least one usable one are needed")
        if self.max_num_seqs < 1 or self.max_batched_tokens < 1:
            raise ConfigError("max_num_seqs and max_batched_tokens must be at least 1")
        if self.idle_step_ns < 1:
            raise ConfigError("idle_step_ns must be positive: a step without work must let time pass")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one `Engine.run`."""

    steps: int
    empty_steps: int
    preemptions: int
    resumes: int
    resumes_with_load: int
    local_hit_tokens: int
    external_hit_tokens: int
    load_failures: int
    tokens_computed: int
    tokens_recomputed: int
    tokens_generated: int
    requests_finished: int
    requests_aborted: int
