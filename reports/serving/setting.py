"""What one simulated run serves with: model, hosts, tiers, policies. Values only, checked where they are made.

`tiers[0]` is each worker's own host memory, from which the GPU loads. Further tiers lie behind it: what they hold is
loaded into host memory first, published there, and then goes on to the GPU, as kvcore's prefetch does it. A shared tier
is one store and one line for all workers; another one exists once per worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvcore.admission import Limits
from kvcore.errors import ConfigError
from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.numbers import check_count, check_not_negative, check_positive
from kvcore.reports.tier import BLOCK_TOKENS, Tier

WORKERS_MAX = 1024
BYTES_MAX = 10**18
STEP_TOKENS = 8192
BATCH_MAX = 256
HBM_SHARE = 0.9  # what engines take of the GPU's memory by default (vLLM: gpu_memory_utilization)


class Policy(Enum):
    """Which cached prefixes are loaded."""

    NEVER = "never"  # no cache at all
    ALWAYS = "always"
    PAYS = "pays"  # kvcore.admission.decide
    SPLIT = "split"  # as PAYS, and the front of a prefix may be computed while its back is loaded


class Eviction(Enum):
    """Who leaves a full tier. LRU and S3_FIFO are the product's; the others are yardsticks (serving/eviction.py)."""

    LRU = "lru"
    S3_FIFO = "s3fifo"
    FIFO = "fifo"
    LFU = "lfu"
    BELADY = "belady"


class Router(Enum):
    """Which worker gets a request."""

    PREFIX = "prefix"  # the one with the least work, tokens it has cached not counted
    LEAST = "least"  # the one with the least work
    ROUND = "round"  # one after the other


@dataclass(frozen=True, slots=True)
class CacheTier:
    """A place to load from and the bytes it holds."""

    tier: Tier
    capacity_bytes: int
    shared: bool = False

    def __post_init__(self) -> None:
        check_count(f"capacity_bytes of {self.tier.name}", self.capacity_bytes, 1, BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of a sweep. `load` divides the trace's times: 2 is twice the rate.

    `step_tokens`: tokens that the engine puts into one step at most (chunked prefill). `batch_max`: sequences at a
    time. `block_tokens`: tokens per copy between host memory and GPU. `limits`: floor, ceiling and
    objective of the admission.
    """

    model: Model
    host: Host
    tiers: tuple[CacheTier, ...] = ()
    policy: Policy = Policy.PAYS
    eviction: Eviction = Eviction.LRU
    workers: int = 1
    router: Router = Router.PREFIX
    overlap: bool = False
    load: float = 1.0
    step_tokens: int = STEP_TOKENS
    batch_max: int = BATCH_MAX
    block_tokens: int = BLOCK_TOKENS
    lookup_s: float = 0.0
    limits: Limits = field(default_factory=Limits)
    name: str = ""

    def __post_init__(self) -> None:
        check_count("workers", self.workers, 1, WORKERS_MAX)
        check_count("step_tokens", self.step_tokens, 1, 10**9)
        check_count("batch_max", self.batch_max, 1, 10**6)
        check_count("block_tokens", self.block_tokens, 1, 10**6)
        check_positive("load", self.load, 1e6)
        check_not_negative("lookup_s", self.lookup_s, 3600.0)
        if self.policy is not Policy.NEVER and not self.tiers:
            raise ConfigError(f"policy {self.policy.value!r} needs a tier to load from; policy 'never' needs none")
        if self.tiers and self.tiers[0].shared:
            raise ConfigError("the first tier is each worker's own host memory and cannot be shared")
        if self.room_tokens < 1:
            raise ConfigError(
                f"{self.model.name} does not fit: its weights take {self.model.weight_bytes / 2**30:.0f} GiB of "
                f"{self.host.gpus} x {self.host.gpu} with {self.hbm_bytes / 2**30:.0f} GiB; use more GPUs per replica"
            )

    @property
    def hbm_bytes(self) -> float:
        return HBM_SHARE * self.host.hbm_bytes * self.host.gpus

    @property
    def room_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; what does not grow with the sequence is left out."""
        per_token = max(self.model.kv_bytes_per_token(), 1) * self.model.shard_copies(self.host.gpus)
        return int((self.hbm_bytes - self.model.weight_bytes) / per_token)
