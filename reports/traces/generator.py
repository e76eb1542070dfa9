"""A made-up trace of the shape of Mooncake's conversation trace, for a machine that has none.

What is copied is the shape, measured on that trace (12,031 requests, 59 minutes):

    arrivals        3.4 per second, random
    prompts         the same 512 tokens of system prompt first; a conversation begins with 380 tokens and more,
                    log-normal, median 4,300, sigma 1.36, at most 126,000
    conversations   38 % of the requests continue one, after 120 s (median, log-normal), with 700 tokens more (median)
    outputs         about normal, mean 343, deviation 200

so that 12,000 requests have 12,000 input tokens on average, and an endless cache hits a little more than a third of
them. No content is made up, only lengths and ids; the same seed gives the same trace on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, islice

from kvcore.errors import ConfigError
from kvcore.reports.traces.trace import BITS, REQUESTS_MAX, Request, Trace
from kvcore.sim.streams import RandomStream

BLOCK_TOKENS = 512
REQUESTS = 2_000
RATE_PER_S = 3.4
SYSTEM_TOKENS = 512
CONTINUED = 0.385
PROMPT_MIN = SYSTEM_TOKENS + 380
PROMPT_MAX = 126_000
FIRST = (4_300.0, 1.36)  # median and sigma of a log-normal
GROWTH = (700.0, 1.8)
GAP_S = (120.0, 0.9)
OUTPUT = (343.0, 200.0)
OUTPUT_MAX = 2_000


def generate(requests: int = REQUESTS, seed: int = 0, rate_per_s: float = RATE_PER_S) -> Trace:
    """So many requests (module text)."""
    if not 1 <= requests <= REQUESTS_MAX:
        raise ConfigError(f"a trace of {requests} requests cannot be made")
    if not math.isfinite(rate_per_s) or not 0 < rate_per_s <= 1e6:
        raise ConfigError(f"{rate_per_s:g} requests per second cannot be")
    made = tuple(islice(_Conversations(seed, rate_per_s).requests(), requests))
    note = f"made up: {requests:,} requests of the shape of Mooncake's conversation trace (seed {seed})"
    return Trace("generated", BLOCK_TOKENS, made, (note,))


class _Conversations:
    """Open conversations by the time of their next request. `block 0` is the system prompt of all."""

    def __init__(self, seed: int, rate_per_s: float) -> None:
        self._draw = RandomStream(seed, "trace.generated").getrandbits
        self._ids = count(1)
        self._first_per_s = rate_per_s * (1 - CONTINUED)
        self._serial = count()

    def requests(self) -> Iterator[Request]:
        """In order of arrival, endlessly."""
        later: list[tuple[float, int, int, list[int]]] = []
        new_s = 0.0
        while True:
            if later and later[0][0] < new_s:
                at_s, _, tokens, chain = heappop(later)
                tokens += int(self._lognormal(GROWTH)) + 1
            else:
                at_s, chain = new_s, [0]
                tokens = PROMPT_MIN + int(self._lognormal(FIRST))
                new_s += self._exponential() / self._first_per_s
            tokens = min(tokens, PROMPT_MAX)
            yield self._request(at_s, tokens, chain)
            if self._uniform() < CONTINUED:
                heappush(later, (at_s + self._lognormal(GAP_S), next(self._serial), tokens, chain))

    def _request(self, at_s: float, tokens: int, chain: list[int]) -> Request:
        """`chain` keeps the ids of whole blocks; the partial one at the end is nobody else's."""
        while (len(chain) + 1) * BLOCK_TOKENS <= tokens:
            chain.append(next(self._ids))
        rest = (next(self._ids),) if tokens % BLOCK_TOKENS else ()
        output = round(OUTPUT[0] + OUTPUT[1] * self._normal())
        return Request(at_s, tokens, min(max(output, 1), OUTPUT_MAX), (*chain, *rest))

    def _uniform(self) -> float:
        return self._draw(BITS) / (1 << BITS)

    def _exponential(self) -> float:
        return -math.log(1 - self._uniform())

    def _normal(self) -> float:
        return math.sqrt(2 * self._exponential()) * math.cos(2 * math.pi * self._uniform())

    def _lognormal(self, law: tuple[float, float]) -> float:
        return law[0] * math.exp(law[1] * self._normal())
