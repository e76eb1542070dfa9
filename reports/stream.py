"""A stream of requests: what hit rate and load do to the choice between loading and recomputing.

Theory of operation
-------------------
Requests of `prefix + rest` tokens come at random to one replica; a share `hits` of them finds its prefix in the cache.
`load` is the utilisation of the GPU if every prefix were recomputed, so it measures the rate of arrival: rate =
load / prefill(prefix + rest). GPU and link are each one server with a queue, whose mean stay is service / (1 - rho)
(as in reports/breakeven.py), with rho as it comes out of the choice. `sharers` replicas with the same requests load
over one link (a store on the network); a link of one's own has one.

    never     full / (1 - load)
    always    work / (1 - rho_gpu) + hits (wait + link / (1 - rho_link)) + (1 - hits) lookup
    work      (1 - hits) full + hits short             short: prefill of the rest after the prefix
    rho_gpu   rate * work         rho_link   rate * sharers * hits * link
    capacity  full / max(work, sharers * hits * link): how many times the rate of `never` the replica can take at most

Where loading a prefix is faster on an idle machine and the link is not shared, it wins at every load, because less work
queues less. Two things limit it. A lookup that finds nothing costs `lookup_s` and gives nothing, so few hits may cost
more than they save: `hits_floor` is the smallest hit rate at which loading wins. And a shared link fills before the GPU
does: `load_range` is the smallest and the largest load at which loading wins. Steps are 1 %; None: nowhere.

The queues are the simplest there are: random arrivals, service as varied as an exponential one. The serving simulation
(reports/serving) replays real arrivals and batches; this is for a first answer in no time. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvcore.reports.breakeven import TIE, Load, Prefill, inflation

STEPS = 100


@dataclass(frozen=True, slots=True)
class Stream:
    """Mean seconds of a request both ways, from arrival to first token; busy shares and capacity of `always`."""

    never_s: float
    always_s: float
    gpu: float
    link: float
    capacity: float


@dataclass(frozen=True, slots=True)
class Requests:
    """What comes: prefix and rest in tokens, the share of requests that hit, how busy the GPU is without a cache."""

    prefix: int
    rest: int
    hits: float
    load: float
    lookup_s: float = 0.0
    sharers: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.hits <= 1
        assert self.prefix >= 1
        assert self.sharers >= 1


def stream(prefill: Prefill, load: Load, requests: Requests) -> Stream:
    """Both ways (module text); `load.wait_s` has the lookup in it already."""
    prefix, rest, hits = requests.prefix, requests.rest, requests.hits
    full, short = prefill.seconds(prefix + rest, 0), prefill.seconds(rest, prefix)
    link, work = load.link_s(prefix), (1 - hits) * full + hits * short
    shared = requests.sharers * hits * link
    gpu, link_busy = requests.load * work / full, requests.load * shared / full
    on_link = link * inflation(link_busy) if shared > 0 else 0.0
    always = work * inflation(gpu) + hits * (load.wait_s + on_link) + (1 - hits) * requests.lookup_s
    return Stream(full * inflation(requests.load), always, gpu, link_busy, full / max(work, shared))


def hits_floor(prefill: Prefill, load: Load, requests: Requests) -> float | None:
    """Smallest hit rate at which loading wins, in steps of 1 %; the requests' own hit rate is not looked at."""
    for step in range(1, STEPS + 1):
        if _wins(prefill, load, replace(requests, hits=step / STEPS)):
            return step / STEPS
    return None


def load_range(prefill: Prefill, load: Load, requests: Requests) -> tuple[float, float] | None:
    """Smallest and largest load below 1 at which loading wins, in steps of 1 %; the requests' own is not looked at."""
    winning = [step / STEPS for step in range(STEPS) if _wins(prefill, load, replace(requests, load=step / STEPS))]
    return (winning[0], winning[-1]) if winning else None


def _wins(prefill: Prefill, load: Load, requests: Requests) -> bool:
    at = stream(prefill, load, requests)
    return at.always_s * (1 + TIE) < at.never_s  # without a hit the two are one figure, but for the last bit


def finite(value: float) -> float | None:
    """For a table: None for a wait that never ends."""
    return value if math.isfinite(value) else None
