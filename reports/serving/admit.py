"""What a worker does with what it found, by policy; the decision is `kvcore.admission.decide`, the product's own.

The policy sees what a running engine can measure and nothing else: the seconds, tokens and pairs of the steps that have
run, the seconds and bytes of the hauls that have ended, how many requests wait and how long their prompts are, bytes
asked for and not here yet, arrivals per second, busy shares, first and last tokens, and the operator's objective. Not
the model, the host, the tiers' parameters, the trace, or when anything will end.

SPLIT adds one way to each offer: the GPU computes the front of the prefix while its back is loaded. The front is
where both take as long (reports/breakeven.py: `split`), by the same measured rates and queues, and the way is taken
where it beats the decision by the admission's own cost.

A load that is on its way is looked at again whenever the GPU has no prompt to compute (`best_stop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvcore.admission import (
    Decision,
    Gpu,
    Link,
    Offer,
    Prefill,
    Prompt,
    Queue,
    Reason,
    decide,
    stop_gain_s,
)
from kvcore.meters import Backlog, PrefillMeter, ShareMeter, TailMeter
from kvcore.objective import Decodes
from kvcore.reports.breakeven import LineLoad, split
from kvcore.reports.serving.cache import Cache, Choice, Held
from kvcore.reports.serving.gpu import Batch
from kvcore.reports.serving.link import Line
from kvcore.reports.serving.setting import Policy, Setting

SPLIT = "split"


class OnItsWay(NamedTuple):
    """A load that could be stopped: what it would serve with the bytes `left`, and what `part` of it is here."""

    job_index: int
    depth: int
    prompt_tokens: int
    waited_s: float
    share: float
    left: Offer
    part: Choice
    seen: Link


class Admission:
    """One worker's measurements and decisions."""

    def __init__(self, setting: Setting, cache: Cache, lines: Sequence[Line]) -> None:
        self.backlog = Backlog()
        self._policy = setting.policy
        self._limits = setting.limits
        self._cache = cache
        self._lines = lines
        self._layers = setting.model.layers if setting.overlap else 1
        self._prefill = PrefillMeter()
        self._busy = ShareMeter()
        self._rate = ShareMeter()
        self._tail = TailMeter()
        objective = setting.limits.objective
        self._decodes = None if objective is None else Decodes(objective)

    def first_token(self, now_s: float, index: int, seconds: float, steps: int) -> None:
        """A request has its first token, so long after it came, after so many steps of the engine."""
        self._tail.add(seconds)
        if self._decodes is not None:
            self._decodes.began(index, now_s, seconds, steps)

    def last_token(self, now_s: float, index: int, steps: int) -> None:
        """A request has ended."""
        if self._decodes is not None:
            self._decodes.ended(index, now_s, steps)

    def came(self, now_s: float) -> None:
        """A request arrived at this worker."""
        self._rate.add(now_s, 1.0)

    def computed(self, now_s: float, tokens: int, pairs_computed: float, seconds: float) -> None:
        """A step that computed prompts has ended."""
        self._prefill.add(tokens, pairs_computed, seconds)
        self._busy.add(now_s, seconds)

    def choose(
        self, now_s: float, held: Held, choices: Sequence[Choice], ahead: Backlog, batch: Batch, waited_s: float
    ) -> tuple[Choice | None, str]:
        """What to load, and why; None: nothing. `ahead`: what the GPU computes before this request can begin.

        `batch`: the sequences that decode; their number, and the steps so far, are looked at.
        """
        if not choices:
            return None, Reason.NOTHING.value
        if self._policy is Policy.ALWAYS:
            return choices[-1], Policy.ALWAYS.value
        prompt = Prompt(held.prompt_tokens, waited_s)
        gpu, links = self._gpu(now_s, ahead, batch), [line.measured(now_s) for line in self._lines]
        decision = decide(prompt, [choice.offer for choice in choices], gpu, links, self._limits)
        self._remember(choices[-1].offer, decision)
        choice = self._chosen(held, choices, decision)
        if self._policy is Policy.SPLIT and decision.reason in (Reason.PAYS, Reason.COMPUTE):
            return self._split(prompt, held, choices, decision, choice, gpu, links)
        return choice, decision.reason.value

    def _gpu(self, now_s: float, ahead: Backlog, batch: Batch) -> Gpu:
        prefill = self._prefill.prefill
        if prefill is None:
            return Gpu(None)
        queue = Queue(
            waiting=self.backlog.requests,
            running=len(batch),
            work_s=self.backlog.seconds(prefill) + ahead.seconds(prefill),
            rate=self._rate.per_second(now_s),
            busy=self._busy.per_second(now_s),
        )
        gpu = Gpu(prefill, queue, ahead.seconds(prefill), self._tail.tail_s, self._layers)
        if (decodes := self._decodes) is None:
            return gpu
        slacks_s = decodes.slacks_s(now_s, batch.steps)
        return replace(gpu, slacks_s=slacks_s, good_share=decodes.good_share, limit_s=decodes.limit_s)

    def best_stop(
        self, now_s: float, loads: Sequence[OnItsWay], links: Sequence[Link], batch: Batch
    ) -> OnItsWay | None:
        """The load that it pays most to stop now; None: all go on. The GPU has no prompt to compute."""
        gpu = self._gpu(now_s, Backlog(), batch)
        best, best_gain_s = None, 0.0
        for load in loads:
            seen = list(links)
            seen[load.depth] = load.seen
            prompt = Prompt(load.prompt_tokens, load.waited_s)
            gain_s = stop_gain_s(prompt, load.left, load.part.offer, gpu, seen, self._limits)
            if gain_s > best_gain_s:
                best, best_gain_s = load, gain_s
        return best

    def _remember(self, longest: Offer, decision: Decision) -> None:
        used = {at for at, _ in decision.offer.hauls}
        for at, _ in longest.hauls:
            if at not in used:
                self._lines[at].passed_over()

    def _chosen(self, held: Held, choices: Sequence[Choice], decision: Decision) -> Choice | None:
        if not decision.tokens:
            return None
        choice = next(one for one in choices if one.offer == decision.offer)
        if decision.tokens == choice.offer.tokens:
            return choice
        piece = self._cache.choose(held, choice.depth, max(1, decision.tokens // self._cache.chunk_tokens))
        return piece if piece.offer.tokens else None

    def _split(
        self,
        prompt: Prompt,
        held: Held,
        choices: Sequence[Choice],
        decision: Decision,
        choice: Choice | None,
        gpu: Gpu,
        links: Sequence[Link],
    ) -> tuple[Choice | None, str]:
        """The decision, or a split of the longest prefix where that is cheaper still."""
        prefill, longest = gpu.prefill, choices[-1]
        assert prefill is not None
        if any(links[at].line is None for at, _ in longest.offer.hauls):
            return choice, decision.reason.value
        load = _as_load(longest.offer, links)
        terms = _Measured(prefill)
        chunk = self._cache.chunk_tokens
        front = split(terms, load, longest.offer.tokens // chunk * chunk, chunk)
        if not 0 < front < longest.offer.tokens:
            return choice, decision.reason.value
        gain = _split_gain_s(prompt, longest.offer.tokens, front, load, gpu, prefill)
        if gain <= decision.gain_s:
            return choice, decision.reason.value
        return self._cache.choose(held, longest.depth, skip_chunks=front // chunk), SPLIT


class _Measured:
    """Measured rates with the face of the cost model's terms."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill

    def seconds(self, new_tokens: int, prefix_tokens: int = 0) -> float:
        return self._prefill.seconds(new_tokens, prefix_tokens)


def _as_load(offer: Offer, links: Sequence[Link]) -> LineLoad:
    """All hauls of an offer, their queues and latencies, as one line by tokens."""
    wait = token = 0.0
    for at, size in offer.hauls:
        link = links[at]
        assert link.line is not None
        wait += link.queue.work_s + link.line.fixed_s
        token += link.line.byte_s * size / offer.tokens
    return LineLoad(wait, token)


def _split_gain_s(prompt: Prompt, prefix_tokens: int, front: int, load: LineLoad, gpu: Gpu, prefill: Prefill) -> float:
    """Seconds spared over computing everything, by the admission's cost; the link's other users left out."""
    whole = prefill.seconds(prompt.tokens)
    first = prefill.seconds(front)
    rest = prefill.seconds(prompt.tokens - prefix_tokens, prefix_tokens)
    computed = prompt.waited_s + gpu.ahead_s + whole
    split_up = prompt.waited_s + max(gpu.ahead_s + first, load.seconds(prefix_tokens - front)) + rest
    others = gpu.others_s(whole, prompt.waited_s) - gpu.others_s(first + rest, prompt.waited_s)
    return gpu.own_s(computed) - gpu.own_s(split_up) + others
