"""A trace: who asked for what and when, whatever file it came from.

Theory of operation
-------------------
A request has an arrival, a prompt length, an output length and the ids of its prompt's blocks. An id stands for the
block *and everything before it* (a chained hash), so two prompts share a prefix as far as their ids are equal. The last
block is usually partial; the cache keeps whole blocks only, as kvcore does.

Public traces are often quantised: Mooncake's conversation trace has 1,180 different times for 12,031 requests, 3 s
apart. Replayed as they are, each bin is a burst that nobody ever saw, and queueing is all one measures. `spread` adds
a uniform draw from [0, quantum) to each arrival; the readers do it unless asked for `raw_timestamps`, and say so in
the trace's notes. A trace counts as quantised when its requests share their time with another one on average; the
quantum is the median gap between different times.

`check` refuses what would make nonsense later, with the number of the request: times that go backwards, numbers below
their range or beyond any context, ids that do not cover the prompt (a hole), two block sizes in one trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvcore.errors import ConfigError
from kvcore.sim.streams import RandomStream

TOKENS_MAX = 100_000_000
SECONDS_MAX = 1e9
BLOCK_TOKENS_MAX = 65_536
REQUESTS_MAX = 10_000_000
BLOCK_IDS = 1 << 64
BITS = 53
LETTERS_TOLD_MAX = 40


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` holds ceil(input_tokens / block_tokens) chained ids."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `notes` says what was done to the file's numbers, for the reader of a report."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    def first(self, count: int) -> Trace:
        """The first requests alone."""
        return replace(self, requests=self.requests[:count])


def checked(trace: Trace) -> Trace:
    """The trace, if it can be replayed; ConfigError names the first request that cannot (counted from 1)."""
    if not 1 <= trace.block_tokens <= BLOCK_TOKENS_MAX:
        raise ConfigError(
            f"{trace.name}: blocks of {trace.block_tokens} tokens are not between 1 and {BLOCK_TOKENS_MAX}"
        )
    if not trace.requests:
        raise ConfigError(f"{trace.name} holds no requests: is it the right file, and is the limit above 0?")
    if len(trace.requests) > REQUESTS_MAX:
        raise ConfigError(f"{trace.name} holds more than {REQUESTS_MAX:,} requests: give a limit")
    before = -math.inf
    for number, request in enumerate(trace.requests, 1):
        if request.arrival_s < before:
            raise ConfigError(
                f"{trace.name}: request {number} arrives at {request.arrival_s:g} s, before the one in front of it "
                f"({before:g} s): sort the file by time"
            )
        _check_request(request, f"{trace.name}: request {number}", trace.block_tokens)
        before = request.arrival_s
    return trace


def check_tokens(input_tokens: int, output_tokens: int, where: str) -> None:
    """ConfigError for numbers that no request can have. Readers ask before they reckon with blocks, so that a wrong
    number is not answered with a hole."""
    if not 1 <= input_tokens <= TOKENS_MAX:
        raise ConfigError(f"{where} has {told(f'{input_tokens:,}')} input tokens: from 1 to {TOKENS_MAX:,} can be")
    if not 0 <= output_tokens <= TOKENS_MAX:
        raise ConfigError(f"{where} has {told(f'{output_tokens:,}')} output tokens: from 0 to {TOKENS_MAX:,} can be")


def told(number: str) -> str:
    """A number of a file in an error: one of 4,000 digits would hide what is wrong with it."""
    return number if len(number) <= LETTERS_TOLD_MAX else f"{number[:LETTERS_TOLD_MAX]}..."


def _check_request(request: Request, where: str, block_tokens: int) -> None:
    if not math.isfinite(request.arrival_s) or not 0 <= request.arrival_s <= SECONDS_MAX:
        raise ConfigError(f"{where} arrives at {request.arrival_s:g} s: times are from 0 to {SECONDS_MAX:g} s")
    check_tokens(request.input_tokens, request.output_tokens, where)
    wrong = next((block for block in request.blocks if not 0 <= block < BLOCK_IDS), None)
    if wrong is not None:
        raise ConfigError(f"{where} has the block id {told(str(wrong))}: ids are from 0 to 2**64 - 1")
    needed = -(-request.input_tokens // block_tokens)
    if len(request.blocks) != needed:
        raise ConfigError(
            f"{where} has {request.input_tokens:,} input tokens and {len(request.blocks)} block ids, "
            f"but blocks of {block_tokens} tokens need {needed}: a hole, or a second block size in the trace"
        )


def quantum_s(times: Sequence[float]) -> float:
    """The grid that sorted times were rounded to; 0 where most requests have a time of their own."""
    different = sorted(set(times))
    if len(different) < 3 or 2 * len(different) > len(times):
        return 0.0
    gaps = sorted(after - before for before, after in pairwise(different))
    return gaps[len(gaps) // 2]


def spread(trace: Trace, width_s: float, seed: int = 0) -> Trace:
    """Each arrival later by a uniform draw from [0, width), in the new order."""
    if not math.isfinite(width_s) or not 0 <= width_s <= SECONDS_MAX:
        raise ConfigError(f"arrivals cannot be spread over {width_s:g} s")
    draw = RandomStream(seed, "trace.spread").getrandbits
    moved = [
        replace(request, arrival_s=request.arrival_s + width_s * draw(BITS) / (1 << BITS)) for request in trace.requests
    ]
    moved.sort(key=lambda request: request.arrival_s)
    return replace(trace, requests=tuple(moved))


def dequantised(trace: Trace, raw_timestamps: bool, seed: int) -> Trace:
    """The trace with its bins spread (module text), unless `raw_timestamps`; its notes say which."""
    width = quantum_s([request.arrival_s for request in trace.requests])
    if not width:
        return trace
    if raw_timestamps:
        note = f"timestamps as recorded: rounded to {width:.3g} s, so that each bin is a burst"
        return replace(trace, notes=(*trace.notes, note))
    note = f"timestamps were rounded to {width:.3g} s and are spread evenly over it (seed {seed})"
    return replace(spread(trace, width, seed), notes=(*trace.notes, note))


class Chunker:
    """Blocks of a small size as chained blocks of a larger one: ids of whole chunks, and one for the rest."""

    def __init__(self, factor: int) -> None:
        assert factor >= 1
        self._factor = factor
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}
        self._serial = 0

    def chunks(self, blocks: Iterable[int], known: Sequence[int] = ()) -> tuple[int, ...]:
        """`known`: the ids of the first chunks, from a prompt with the same beginning."""
        blocks = tuple(blocks)
        found = list(known)
        before = found[-1] if found else -1
        for start in range(len(found) * self._factor, len(blocks), self._factor):
            part = (before, blocks[start : start + self._factor])
            known_id = self._ids.get(part)
            before = self._ids[part] = self.fresh() if known_id is None else known_id
            found.append(before)
        return tuple(found)

    def fresh(self) -> int:
        """An id that nobody shares."""
        self._serial += 1
        return self._serial - 1
