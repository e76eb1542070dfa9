"""`Case`: everything one seed decides, as plain values that can be shrunk and printed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

BLOCK_TOKENS = 8
TOKEN_KINDS = 997


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """Arrives before step `step`; aborted before `abort_step` unless it has ended."""

    request_id: str
    prompt: tuple[int, ...]
    output_tokens: int
    step: int = 0
    priority: int = 0
    abort_step: int | None = None
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One engine life, run cold and then hot. `windows`: window tokens of each group, None: full attention."""

    seed: int
    requests: tuple[CaseRequest, ...]
    windows: tuple[int | None, ...] = (None,)
    layers: int = 1
    num_blocks: int = 40
    max_num_seqs: int = 8
    max_batched_tokens: int = 64
    chunk_tokens: int = 16
    async_scheduling: bool = False
    v2_runner: bool = False
    priority_policy: bool = False
    prefix_cache: bool = True
    reserve_whole: bool = True
    load_async: bool = True
    load_error_rate: float = 0.0
    reset_steps: tuple[int, ...] = ()
    l1_chunks: int = 400
    step_us: tuple[int, int] = (50, 400)
    passes: int = 2
    steps_max: int = 4000

    def describe(self) -> str:
        kind = "AsyncScheduler" if self.async_scheduling else "Scheduler"
        shape = "V2" if self.v2_runner else "V1"
        loads = "async" if self.load_async else "sync"
        errors = f", {self.load_error_rate:.0%} load errors" if self.load_error_rate else ""
        return (
            f"{kind}/{shape}, windows {self.windows}, {len(self.requests)} requests, {self.num_blocks} blocks, "
            f"{loads} loads{errors}, prefix cache {'on' if self.prefix_cache else 'off'}"
        )


def make_case(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"vllm-scheduler/{seed}")
    windows = rng.choice([(None,), (None,), (None, rng.choice([9, 16, 33])), (None, 20, 12)])
    async_scheduling = rng.random() < 0.5
    load_async = async_scheduling or len(windows) > 1 or rng.random() < 0.4
    errors = rng.choice([0.0, 0.0, 0.05, 0.3])
    prefix_cache = rng.random() < 0.7 and (load_async or not errors)
    requests = make_requests(rng, abort_rate=rng.choice([0.0, 0.0, 0.2]))
    return Case(
        seed=seed,
        requests=requests,
        windows=windows,
        layers=rng.choice([1, 1, 2]),
        num_blocks=tight_blocks(rng, requests, len(windows)),
        max_num_seqs=rng.choice([3, 8, 16]),
        max_batched_tokens=rng.choice([24, 64, 256]),
        chunk_tokens=rng.choice([8, 16, 32]),
        async_scheduling=async_scheduling,
        v2_runner=rng.random() < 0.5,
        priority_policy=rng.random() < 0.3,
        prefix_cache=prefix_cache,
        load_async=load_async,
        load_error_rate=errors,
        reset_steps=tuple(rng.sample(range(5, 80), 2)) if rng.random() < 0.3 and not async_scheduling else (),
        l1_chunks=rng.choice([20, 400, 400]),
        step_us=rng.choice([(20, 60), (50, 400), (400, 2000)]),
    )


def make_requests(rng: random.Random, *, abort_rate: float) -> tuple[CaseRequest, ...]:
    """Families of prompts that share prefixes of any length."""
    families = [[rng.randrange(1, TOKEN_KINDS) for _ in range(160)] for _ in range(rng.randint(1, 3))]
    count, spread = rng.randint(4, 12), rng.choice([1, 20, 60])
    requests = []
    for index in range(count):
        family = rng.choice(families)
        shared, own = rng.randint(0, 110), rng.randint(1, 24)
        prompt = family[:shared] + [rng.randrange(1, TOKEN_KINDS) for _ in range(own)]
        step = rng.randrange(spread)
        abort_step = step + rng.randint(1, 60) if rng.random() < abort_rate else None
        requests.append(
            CaseRequest(
                f"r{index}", tuple(prompt), rng.randint(1, 40), step, rng.randrange(3), abort_step,
                rng.choice(["", "", "", "tenant"]),
            )
        )  # fmt: skip
    return tuple(requests)


def tight_blocks(rng: random.Random, requests: tuple[CaseRequest, ...], groups: int) -> int:
    """Enough for the longest request alone, and not for all."""
    longest = max(len(request.prompt) + request.output_tokens for request in requests)
    least = groups * (-(-longest // BLOCK_TOKENS) + 1) + 2
    return least + rng.choice([0, 2, least // 2, least])


def without(case: Case, request_id: str) -> Case:
    return replace(case, requests=tuple(each for each in case.requests if each.request_id != request_id))
