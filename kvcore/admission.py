"""Load only what pays: how much of a found prefix to load, from what the running system has measured.

Theory of operation
-------------------
A lookup has found a prefix. Loading it spares the GPU work and costs the link time; both have queues. `decide` weighs
the ways to serve the prompt and takes the cheapest. A way is an `Offer`: so many tokens, and per link the bytes to haul
(an L2 store into host memory, then host memory into the GPU); recomputing is the offer of no tokens, and always there.

    cost = own + beyond + late + others(compute) + sum over links of lost(link, haul)

    others(x) = lost(gpu, x) + TAIL_WEIGHT * x * above(tail, x) + spoilt(x)

    own    = waited + max(wait for the GPU, wait for the hauls) + compute      (less what overlaps, with layers ahead)
    beyond = TAIL_WEIGHT * (own - tail), where own is above the tail
    late   = OWN_LATE * good * answer, where own is above the objective's limit
    lost(queue, x) = x * (waiting + (rate * (work + x/2) + RUNNING_WEIGHT * busy^2 * running) / (1 - busy))
    spoilt(x) = answer * (good * above(limit, x) + sum over sequences that decode of min(1, x / slack))
    answer = GOOD_S * busy * (1 - good) / good
    above(limit, x) = how many of those who wait or come get their first token later than that

`own` is this request's time to its first token. `lost` is what the others lose because x seconds of work go in front of
them. Everyone who waits loses x, and so does everyone who comes (at `rate`) before the queue is empty again: a queue
with `work` seconds in it runs empty after work/(1 - busy), and x more seconds make that x/(1 - busy) longer, on whose
average half of x is done. Without that term a full GPU would look as cheap as an idle one; with it, an idle system
gives Pollaczek and Khinchin's wait (Kleinrock, Queueing Systems I, 5.6). So a second on a loaded GPU is dear, a second
on a loaded link too, and where both are full the requests that spare most per second of link are the ones that load.

The sequences that decode on the GPU (`running`) lose x too, but not of a first token. On an idle GPU that is no reason
to let somebody wait for a slow load; on a full one they stay longer, with the memory they hold, and everyone behind
them waits. Hence a weight that grows with the busy share; its form and factor are ours, chosen by simulation (the
project's reports, over both Mooncake traces), where busy in place of busy^2 made an idle GPU load too much.

`beyond` keeps the slowest requests from paying for the average: a request whose own time would be above the `tail`
(what one in fifty exceeds, as measured) gives its time up for others only where it helps them several times as much.
Others above the tail lose x with the same weight: a request that computes must not push them where it would not go
itself. The queue, work + x long, shortens by 1 - busy per second, so those who come in the next
(work + x - free)/(1 - busy) seconds are above, where `free` is the tail less the mean seconds of a prompt (busy/rate);
the times of those who wait are taken to lie evenly between what this one has waited and work.

`spoilt` and `late` are there where the operator has told an objective (`kvcore.objective`): x seconds of computing hold
up every sequence that decodes, and one that has only `slack` seconds left within its limit is no longer good after
them; so are those no longer good, as far as they would have been, that get their first token too late. A good answer is
worth the more seconds the smaller the measured share of `good` ones; where nearly all are good, or the GPU has time to
make up for it, mean times count alone. Without an objective nothing is spoilt.

A load is promised with a way back: while it is on its way it may be stopped, and what has arrived is kept
(`stop_gain_s`). When the GPU has nothing else to compute, in about work/(1 - busy) seconds, the rest is computed then,
if that is cheaper, and holds up nobody who waits. So a load costs the lesser of both: going on to its end, or being
stopped there. That is why a long load may be begun, and why its link does not stay blocked for those behind it.

What is measured: rates and shares by `kvcore.meters`; queue lengths, that is requests that wait, sequences that run,
seconds of work by those rates; slacks and the share of good answers by `kvcore.objective.Decodes`.

Before anything was measured of the GPU or of a link, what is found there is loaded, as without this module; of an
unmeasured link at most `TRIALS` hauls at a time, since it may be slow. A link that nothing was loaded over for
`PROBE_AFTER` found prefixes may have become faster: a small piece (`PROBE_TOKENS`) more than what pays is loaded.

`Limits`, from the configuration, have the last word on loads of a whole prefix: below `floor_tokens` nothing is loaded,
from `ceiling_tokens` on everything, whatever was measured. Floor 0 and ceiling 0 together: always load.

Nothing here knows the time (it comes as an argument), draws, or holds anything. Seconds are float: no test or replay
depends on their last bits, since a tie takes the offer that loads less.

Rejected: pieces of a prefix as further ways (the simulation showed no gain); a threshold in tokens (right for one link,
one load, one rest of the prompt); 1/(1 - busy) as the only price (averages over a minute; blind to the burst that is
here now); selfish choice (own time only: on a full GPU with a slow store it computes what would have spared everybody).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique

from kvcore.errors import ConfigError
from kvcore.objective import Objective

TRIALS = 4
PROBE_TOKENS = 512
PROBE_AFTER = 512
SLACK_MIN = 0.05  # 1 - busy is taken as at least this: a busy share of one minute is no proof of an endless queue
TIE = 1e-9
RUNNING_WEIGHT = 4.0
TAIL_WEIGHT = 12.0
GOOD_S = 240.0
OWN_LATE = 0.5  # a request's own predicted lateness; its answer may be lost by its decoding too
GOOD_MIN = 0.02  # the share of good answers is taken as at least this
TOKENS_MAX = 1 << 40


@unique
class Reason(Enum):
    """Why a decision is what it is."""

    NOTHING = "nothing found"
    PAYS = "loading pays"
    COMPUTE = "computing is cheaper"
    FLOOR = "below the floor"
    CEILING = "above the ceiling"
    PROBE = "a piece more, to measure the link"
    UNMEASURED = "not measured yet"


@dataclass(frozen=True, slots=True)
class Limits:
    """From the configuration. `ceiling_tokens` None: there is none; so for the `objective`."""

    floor_tokens: int = 0
    ceiling_tokens: int | None = None
    objective: Objective | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.floor_tokens <= TOKENS_MAX:
            raise ConfigError(f"the admission floor must be 0 tokens or more, not {self.floor_tokens}")
        if self.ceiling_tokens is not None and not self.floor_tokens <= self.ceiling_tokens <= TOKENS_MAX:
            raise ConfigError(
                f"the admission ceiling of {self.ceiling_tokens} tokens is below the floor of {self.floor_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Line:
    """Measured seconds of one haul."""

    fixed_s: float
    byte_s: float

    def seconds(self, size: float) -> float:
        return self.fixed_s + self.byte_s * size if size > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Measured seconds of computing. The fixed part of a step is not in it: loading does not spare the step."""

    token_s: float
    pair_s: float

    def seconds(self, new_tokens: int, prefix_tokens: int = 0) -> float:
        return self.token_s * new_tokens + self.pair_s * pairs(new_tokens, prefix_tokens)


def pairs(new_tokens: int, prefix_tokens: int) -> float:
    """Pairs of query and key that causal attention computes."""
    return new_tokens * (prefix_tokens + new_tokens / 2)


@dataclass(frozen=True, slots=True)
class Queue:
    """In front of a GPU or on a link: requests behind this one, sequences that run beside it, seconds of work, arrivals
    per second, busy share."""

    waiting: int = 0
    running: int = 0
    work_s: float = 0.0
    rate: float = 0.0
    busy: float = 0.0

    def lost_s(self, work_s: float) -> float:
        """What others lose when so many seconds are put in front of them (module text)."""
        slack = max(1 - self.busy, SLACK_MIN)
        running = RUNNING_WEIGHT * min(self.busy, 1.0) ** 2 * self.running
        return work_s * (self.waiting + (running + self.rate * (self.work_s + work_s / 2)) / slack)

    def above(self, limit_s: float, work_s: float, waited_s: float) -> float:
        """How many of those who wait or come get their first token later than that, with so many seconds put in front
        of them by one who has waited so long (module text)."""
        prompt_s = self.busy / self.rate if self.rate else 0.0
        free_s = limit_s - prompt_s
        come_s = max(self.work_s + work_s - free_s, 0.0) / max(1 - self.busy, SLACK_MIN)
        first_s, last_s = sorted((waited_s, self.work_s))
        wide_s = max(last_s - first_s, work_s, TIE)
        return self.rate * come_s + self.waiting * min(max(last_s + work_s - free_s, 0.0) / wide_s, 1.0)


IDLE = Queue()


@dataclass(frozen=True, slots=True)
class Gpu:
    """`prefill` None: not measured. `ahead_s`: seconds until this request could begin to compute. `tail_s` 0: unknown.

    `layers`: pieces in which the last haul overlaps the computing; 1: it must be there first. `slacks_s`: how long each
    sequence that decodes may be held up and still be good; empty without an objective. `good_share`: of late.
    `limit_s`: the objective's, for the first token.
    """

    prefill: Prefill | None
    queue: Queue = IDLE
    ahead_s: float = 0.0
    tail_s: float = 0.0
    layers: int = 1
    slacks_s: tuple[float, ...] = ()
    good_share: float = 1.0
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        assert all(slack > 0 for slack in self.slacks_s), "what cannot be good any more is not counted"

    @property
    def answer_s(self) -> float:
        """What a good answer is worth in seconds (module text)."""
        odds = (1 - self.good_share) / max(self.good_share, GOOD_MIN)
        return GOOD_S * min(self.queue.busy, 1.0) * odds

    def own_s(self, seconds: float) -> float:
        """What a time to the first token costs whose request it is: itself, `beyond` and `late` (module text)."""
        beyond = TAIL_WEIGHT * (seconds - self.tail_s) if 0 < self.tail_s < seconds else 0.0
        late = OWN_LATE * self.good_share * self.answer_s if seconds > self.limit_s else 0.0
        return seconds + beyond + late

    def others_s(self, work_s: float, waited_s: float) -> float:
        """What so many seconds of computing cost everybody else, for one who has waited so long (module text)."""
        above = self.queue.above(self.tail_s, work_s, waited_s) if self.tail_s > 0 else 0.0
        return self.queue.lost_s(work_s) + TAIL_WEIGHT * work_s * above + self.spoilt_s(work_s, waited_s)

    def spoilt_s(self, work_s: float, waited_s: float) -> float:
        """What the answers are worth that so many seconds of computing make miss their objective (module text)."""
        held_up = sum([min(1.0, work_s / slack) for slack in self.slacks_s])
        late = self.queue.above(self.limit_s, work_s, waited_s)
        return (held_up + self.good_share * late) * self.answer_s

    @property
    def idle_in_s(self) -> float:
        """When there will be no prompt to compute."""
        return self.queue.work_s / max(1 - self.queue.busy, SLACK_MIN)

    def when_idle(self) -> Gpu:
        """As it will be then: nobody waits, others decode and come."""
        return replace(self, queue=replace(self.queue, waiting=0, work_s=0.0), ahead_s=0.0)


@dataclass(frozen=True, slots=True)
class Link:
    """`line` None: not measured. `hauls`: under way. `idle_offers`: found prefixes since the last one."""

    line: Line | None
    queue: Queue = IDLE
    hauls: int = 0
    idle_offers: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to serve: this many tokens from the cache, with (link, bytes) to haul, one after the other."""

    tokens: int
    hauls: tuple[tuple[int, int], ...]


NOTHING = Offer(0, ())


@dataclass(frozen=True, slots=True)
class Decision:
    """`tokens` of the found prefix are to be loaded: those of `offer`, or less for a probe; NOTHING: compute.

    `gain_s`: what that spares over computing, by the costs of the module text; 0 where nothing was compared.
    """

    tokens: int
    reason: Reason
    offer: Offer = NOTHING
    gain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Its tokens, at least one more than any offer serves, and the seconds since it arrived.

    `prefix_tokens`: what the engine has already, in front of them.
    """

    tokens: int
    waited_s: float = 0.0
    prefix_tokens: int = 0


def decide(prompt: Prompt, offers: Sequence[Offer], gpu: Gpu, links: Sequence[Link], limits: Limits) -> Decision:
    """The cheapest way to serve a prompt. `offers` by ascending tokens, the found prefix last; none: nothing found."""
    offers = [offer for offer in offers if offer.tokens > 0]
    if not offers:
        return Decision(0, Reason.NOTHING)
    longest = offers[-1]
    assert longest.tokens < prompt.tokens, "at least one token is computed"
    if limits.ceiling_tokens is not None and longest.tokens >= limits.ceiling_tokens:
        return Decision(longest.tokens, Reason.CEILING, longest)
    if longest.tokens < limits.floor_tokens:
        return Decision(0, Reason.FLOOR)
    if gpu.prefill is None:
        return Decision(longest.tokens, Reason.UNMEASURED, longest)
    return _cheapest(prompt, offers, gpu, gpu.prefill, links, limits)


def _cheapest(
    prompt: Prompt, offers: Sequence[Offer], gpu: Gpu, prefill: Prefill, links: Sequence[Link], limits: Limits
) -> Decision:
    unknown = next((offer for offer in offers if not _measured(offer, links)), None)
    if unknown is not None and all(links[at].hauls < TRIALS for at, _ in unknown.hauls if links[at].line is None):
        return Decision(unknown.tokens, Reason.UNMEASURED, unknown)
    computing = best_cost = cost_s(prompt, NOTHING, gpu, prefill, links)
    best = NOTHING
    for offer in offers:
        if offer.tokens < limits.floor_tokens or not _measured(offer, links):
            continue
        cost = promise_cost_s(prompt, offer, gpu, prefill, links)
        if cost < best_cost * (1 - TIE):
            best, best_cost = offer, cost
    probe = next((offer for offer in offers if offer.tokens > best.tokens and _stale(offer, links)), None)
    if probe is not None:
        return Decision(min(probe.tokens, best.tokens + PROBE_TOKENS), Reason.PROBE, probe)
    if best is NOTHING:
        return Decision(0, Reason.COMPUTE)
    return Decision(best.tokens, Reason.PAYS, best, computing - best_cost)


def _measured(offer: Offer, links: Sequence[Link]) -> bool:
    return all(links[at].line is not None for at, _ in offer.hauls)


def _stale(offer: Offer, links: Sequence[Link]) -> bool:
    return _measured(offer, links) and any(links[at].idle_offers >= PROBE_AFTER for at, _ in offer.hauls)


def cost_s(prompt: Prompt, offer: Offer, gpu: Gpu, prefill: Prefill, links: Sequence[Link]) -> float:
    """Own time and what others lose, in seconds (module text). All of the offer's links are measured."""
    arrived = lost = haul = 0.0
    for at, size in offer.hauls:
        link = links[at]
        assert link.line is not None
        haul = link.line.byte_s * size
        arrived += link.queue.work_s + link.line.fixed_s + haul
        lost += link.queue.lost_s(haul)
    compute = prefill.seconds(prompt.tokens - offer.tokens, prompt.prefix_tokens + offer.tokens)
    assert compute >= 0
    spared = min(haul, compute) * (1 - 1 / gpu.layers)  # h/L + (L-1)/L max(h, c) + c/L instead of h + c
    own = prompt.waited_s + max(arrived - spared, gpu.ahead_s) + compute
    return gpu.own_s(own) + gpu.others_s(compute, prompt.waited_s) + lost


def promise_cost_s(prompt: Prompt, offer: Offer, gpu: Gpu, prefill: Prefill, links: Sequence[Link]) -> float:
    """Of a load that may be stopped while its first haul is on its way (module text)."""
    cost = cost_s(prompt, offer, gpu, prefill, links)
    at, size = offer.hauls[0]
    link = links[at]
    assert link.line is not None
    idle_s, haul_s = gpu.idle_in_s, link.line.seconds(size)
    arrived = max(idle_s - link.queue.work_s, 0.0)
    if arrived >= haul_s:
        return cost
    tokens = int(offer.tokens * arrived / haul_s)
    compute = prefill.seconds(prompt.tokens - tokens, prompt.prefix_tokens + tokens)
    others = gpu.when_idle().others_s(compute, prompt.waited_s) + link.queue.lost_s(arrived)
    return min(cost, gpu.own_s(prompt.waited_s + idle_s + compute) + others)


def stop_gain_s(prompt: Prompt, left: Offer, arrived: Offer, gpu: Gpu, links: Sequence[Link], limits: Limits) -> float:
    """Seconds spared by stopping a load that is on its way and computing the rest; not above 0: let it go on.

    `left`: what it would serve, and the bytes still to haul. `arrived`: what it serves when it is stopped, and the
    bytes to haul of that. The links' queues are those in front of this load and behind it.
    """
    if gpu.prefill is None or not (_measured(left, links) and _measured(arrived, links)):
        return 0.0
    if limits.ceiling_tokens is not None and left.tokens >= limits.ceiling_tokens:
        return 0.0
    if 0 < arrived.tokens < limits.floor_tokens:
        return 0.0
    going, stopped = (cost_s(prompt, offer, gpu, gpu.prefill, links) for offer in (left, arrived))
    return going - stopped if stopped < going * (1 - TIE) else 0.0
