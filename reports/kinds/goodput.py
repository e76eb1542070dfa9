"""`kvcore report goodput`: up to which load do the requests meet their objectives, with which policy?

The same simulation as `trace`, over several loads. A policy *holds* a load where at least `SHARE_HELD` of the requests
meet every limit; the verdict names the highest load below which all loads tried are held. Nothing is interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.errors import ConfigError
from kvcore.reports.kinds import replay
from kvcore.reports.kinds.replay import Replay, told, way
from kvcore.reports.page import Lines, Report, Series, Work, words
from kvcore.reports.serving import Policy
from kvcore.reports.slo import Goodput

SHARE_HELD = 0.9


def build(prepared: Replay, work: Work) -> Report:
    """The report; ConfigError for a trace without a rate."""
    assert prepared.ask.slo is not None
    if prepared.trace.duration_s <= 0:
        raise ConfigError(
            f"all requests of {prepared.trace.name} arrive at once: there is no rate to multiply by a load"
        )
    served = replay.serve(prepared, work)
    title = f"Up to which load does {served.trace.name} meet {served.ask.slo}?"
    return replay.report("goodput", title, served, work, verdict=_verdict(served), charts=_charts(served))


def _good(served: Replay, policy: Policy, load: float) -> Goodput | None:
    result = served.of(policy, load, served.ask.evictions[0])
    return result.goodput(served.ask.slo) if result else None


def held(served: Replay, policy: Policy) -> float | None:
    """The highest load up to which all loads tried are held; None: not even the lowest."""
    highest = None
    for load in sorted(served.ask.loads):
        good = _good(served, policy, load)
        if good is None or good.share is None or good.share < SHARE_HELD:
            break
        highest = load
    return highest


def _verdict(served: Replay) -> Iterator[str]:
    yield f"{served.trace.name}, {words.count(len(served.trace), 'request')}; {served.place}; SLO {served.ask.slo}."
    parts = [f"{_name(served, policy)} {_held_words(served, policy)}" for policy in served.ask.policies]
    yield f"{SHARE_HELD:.0%} of the requests meet it: {'; '.join(parts)}."
    if len(served.results) < len(served.cells):
        yield "Not all cells were served: which policy holds more is not said."
    else:
        yield from _best(served)


def _name(served: Replay, policy: Policy) -> str:
    """What is judged: of several evictions the first. The table has all."""
    return way(served.ask, policy, served.ask.evictions[0])


def _held_words(served: Replay, policy: Policy) -> str:
    highest = held(served, policy)
    above = [load for load in sorted(served.ask.loads) if highest is None or load > highest]
    unknown = bool(above) and served.of(policy, above[0], served.ask.evictions[0]) is None
    if highest is None:
        return "(not served)" if unknown else "at none of the loads tried"
    rate = highest * len(served.trace) / served.trace.duration_s
    least = "at least " if unknown else ""
    return f"{least}up to {told(highest)} times the trace's rate ({words.digits(rate)} requests/s)"


def _best(served: Replay) -> Iterator[str]:
    """A cache is recommended only where it holds more load than none."""
    if Policy.NEVER not in served.ask.policies:
        return
    none = held(served, Policy.NEVER) or 0.0
    others = {policy: held(served, policy) or 0.0 for policy in served.ask.policies if policy is not Policy.NEVER}
    better = {policy: highest for policy, highest in others.items() if highest > none}
    worse = [_name(served, policy) for policy, highest in others.items() if highest < none]
    if better:
        best = max(better, key=lambda policy: better[policy])
        yield f"Worth it: {_name(served, best)} holds {told(better[best])} times the rate, no cache {told(none)} times."
    else:
        yield "At these loads a cache holds no more than none."
    if worse:
        yield f"Worse than no cache: {words.listed(worse)}."


def _charts(served: Replay) -> Iterator[Lines]:
    trace = served.trace
    rates = [load * len(trace) / trace.duration_s for load in served.ask.loads]
    shares, per_s = [], []
    for policy in served.ask.policies:
        goods = [_good(served, policy, load) for load in served.ask.loads]
        dashed, name = policy is Policy.NEVER, _name(served, policy)
        share = [None if good is None or good.share is None else 100 * good.share for good in goods]
        shares.append(Series(name, rates, share, dashed, points=True))
        per_s.append(Series(name, rates, [None if good is None else good.per_s for good in goods], dashed, points=True))
    x = "Requests per second offered"
    yield Lines("goodput_share", f"Requests that meet {served.ask.slo}", x, "Share of the requests, %", tuple(shares))
    yield Lines("goodput_rate", "Goodput", x, "Good requests per second", tuple(per_s))
