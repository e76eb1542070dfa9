"""What the admission is told of a running system (`kvcore.admission`), measured from its steps, hauls and requests.

    PrefillMeter  seconds of a step by its tokens and its pairs of query and key; a least-squares fit with decay
    LineMeter     one per link: seconds of a haul, alone on the link, by its bytes; fixed part and seconds per byte
    ShareMeter    how busy a GPU or a link is, and how many arrive per second, over the last minute
    TailMeter     the time to the first token that one request in fifty exceeds
    Backlog       the prompts that wait, from which seconds follow by the rates

Times come as arguments. Who holds: whoever feeds a meter; nothing is announced or freed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvcore.admission import Line, Prefill

DECAY = 0.998  # weight of the sample before this one: the last 500 count most
SAMPLES_MIN = 2
WINDOW_S = 60.0
TAIL_SHARE = 0.02
TAIL_STEP = 0.1  # of the mean: a tail ten times the mean is found within some hundred requests
TIE = 1e-9


class Backlog:
    """Prompts that wait for the GPU, in tokens and pairs, so that seconds follow from the measured rates."""

    __slots__ = ("_pairs_twice", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self._pairs_twice = 0  # whole numbers: what is added and removed again leaves nothing behind

    def add(self, new_tokens: int, prefix_tokens: int = 0) -> None:
        self.requests += 1
        self.tokens += new_tokens
        self._pairs_twice += new_tokens * (2 * prefix_tokens + new_tokens)

    def remove(self, new_tokens: int, prefix_tokens: int = 0) -> None:
        self.requests -= 1
        self.tokens -= new_tokens
        self._pairs_twice -= new_tokens * (2 * prefix_tokens + new_tokens)
        assert self.requests >= 0

    def seconds(self, prefill: Prefill) -> float:
        return prefill.token_s * self.tokens + prefill.pair_s * (self._pairs_twice / 2)


class LineMeter:
    """Seconds against size: a weighted least-squares line whose old samples fade."""

    __slots__ = ("_samples", "_sums", "_weight")

    def __init__(self) -> None:
        self._samples = 0
        self._weight = 0.0
        self._sums = [0.0, 0.0, 0.0, 0.0]  # of x, x*x, y, x*y

    def add(self, size: float, seconds: float) -> None:
        """One haul that had the link for itself."""
        assert size > 0
        assert seconds >= 0
        self._samples += 1
        self._weight = self._weight * DECAY + 1
        for at, value in enumerate((size, size * size, seconds, size * seconds)):
            self._sums[at] = self._sums[at] * DECAY + value

    @property
    def line(self) -> Line | None:
        """None before the first sample. Samples of one size alone: no fixed part can be told from them."""
        if not self._samples:
            return None
        x, xx, y, xy = (total / self._weight for total in self._sums)
        spread = xx - x * x
        if self._samples < SAMPLES_MIN or spread <= 1e-6 * xx:
            return Line(0.0, y / x)
        slope = max((xy - x * y) / spread, 0.0)
        fixed = y - slope * x
        return Line(fixed, slope) if fixed >= 0 else Line(0.0, xy / xx)


class PrefillMeter:
    """Seconds of a step against its tokens and pairs: a weighted least-squares plane whose old samples fade."""

    __slots__ = ("_fit", "_samples", "_sums")

    REFIT_AFTER = 16

    def __init__(self) -> None:
        self._samples = 0
        self._sums = [0.0] * 8  # weight, n, p, y, nn, np, pp, ny, py: see add
        self._sums.append(0.0)
        self._fit: Prefill | None = None

    def add(self, tokens: int, pairs_computed: float, seconds: float) -> None:
        """One step that computed prompts: all its new tokens and pairs together."""
        assert tokens > 0
        n, p = float(tokens), pairs_computed
        sample = (1.0, n, p, seconds, n * n, n * p, p * p, n * seconds, p * seconds)
        self._sums = [total * DECAY + value for total, value in zip(self._sums, sample)]
        self._samples += 1
        if self._samples <= self.REFIT_AFTER or self._samples % self.REFIT_AFTER == 0:
            self._fit = self._fitted()

    @property
    def prefill(self) -> Prefill | None:
        """None before the first sample."""
        return self._fit

    def _fitted(self) -> Prefill:
        weight, n, p, y, nn, np_, pp, ny, py = self._sums
        n, p, y = n / weight, p / weight, y / weight
        var_n, var_p = nn / weight - n * n, pp / weight - p * p
        both, n_y, p_y = np_ / weight - n * p, ny / weight - n * y, py / weight - p * y
        apart = var_n * var_p - both * both
        if self._samples >= SAMPLES_MIN + 1 and apart > 1e-6 * var_n * var_p > 0:
            token_s, pair_s = (n_y * var_p - p_y * both) / apart, (p_y * var_n - n_y * both) / apart
            if token_s > 0 and pair_s >= 0:
                return Prefill(token_s, pair_s)
        if var_n > 1e-6 * n * n and n_y > 0:
            return Prefill(n_y / var_n, 0.0)
        return Prefill(y / n, 0.0)


@dataclass(slots=True)
class ShareMeter:
    """A sum per second over about the last `window_s`: busy seconds make a share, ones make a rate."""

    window_s: float = WINDOW_S
    _sum: float = field(default=0.0, init=False)
    _begin_s: float | None = field(default=None, init=False)
    _last_s: float = field(default=0.0, init=False)

    def add(self, now_s: float, amount: float) -> None:
        """`amount` more at this time; times do not go backwards."""
        self._fade(now_s)
        self._sum += amount

    def per_second(self, now_s: float) -> float:
        """0 before the first sample. A young meter divides by the time it has seen."""
        if self._begin_s is None:
            return 0.0
        self._fade(now_s)
        seen = self.window_s * -math.expm1(-(now_s - self._begin_s) / self.window_s)
        return self._sum / max(seen, self.window_s / 60)

    def _fade(self, now_s: float) -> None:
        if self._begin_s is None:
            self._begin_s = self._last_s = now_s
        assert now_s >= self._last_s - TIE
        if now_s > self._last_s:
            self._sum *= math.exp((self._last_s - now_s) / self.window_s)
            self._last_s = now_s


class TailMeter:
    """What a share `TAIL_SHARE` of the samples exceeds, followed in steps of a part of their mean (Robbins, Monro)."""

    __slots__ = ("_mean", "tail_s")

    def __init__(self) -> None:
        self._mean = 0.0
        self.tail_s = 0.0

    def add(self, seconds: float) -> None:
        """One time to a first token. The tail is 0 before the first."""
        assert seconds >= 0
        self._mean += (seconds - self._mean) / 100 if self._mean else seconds
        up = 1 - TAIL_SHARE if seconds > self.tail_s else -TAIL_SHARE
        self.tail_s = max(self.tail_s + TAIL_STEP * self._mean * up, 0.0)
