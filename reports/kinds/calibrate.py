"""`kvcore report calibrate`: measure this machine, predict, then run both ways and hold one against the other.

The engine is the ladder's small transformer in torch on the CPU (reports/calibration/engine.py), so the *break-even in
tokens* is this engine's and nobody else's; what is shown is that the cost model, fed with measured pieces, predicts
what a real engine with a real cache does. Loads come from L1 and from a file L2.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.calibration.engine import CHUNK_TOKENS, CalibrationEngine, Way, check_torch, tokens_max
from kvcore.reports.calibration.prediction import ERROR_BAR, Laws, Point, bar_of, measured_break_even
from kvcore.reports.calibration.rates import Rates, measure_rates
from kvcore.reports.calibration.rounds import ROUNDS_LEAST, TIERS, WAYS, Rounds
from kvcore.reports.page import Column, Lines, Mark, Report, Series, Table, Value, Work, words

PREFIXES = (32, 64, 112, 176, 256, 352, 480)
IDLE_SHARE = 0.9

COLUMNS = (
    Column("prefix_tokens", "Prefix", "count", "tokens that the cache has"),
    Column("way", "Way"),
    Column("predicted_s", "Predicted TTFT", "seconds", "from the laws fitted to the measured pieces"),
    Column(
        "measured_s",
        "Measured TTFT",
        "seconds",
        "mean of the medians of the two halves, A and A'; a run is the mean of its tries, without waits for a core",
    ),
    Column("error", "Error", "share", "|predicted / measured - 1|"),
    Column("spread", "A/A spread", "share", "|A - A'| / A"),
    Column("bar", "Bar", "share", f"max({ERROR_BAR:.0%}, 2 * A/A spread)"),
    Column("verdict", "Verdict", "verdict", "met: error <= bar"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """Checked by `checked`. `rounds`: runs of each half of each figure."""

    prefixes: tuple[int, ...] = PREFIXES
    rest: int = 16
    rounds: int = 7
    store: Path | None = None
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """What has been measured so far; an interrupt leaves it as it is."""

    rates: Rates | None = None
    core_share: float = 1.0
    laws: Laws | None = None
    points: list[Point] = field(default_factory=list)
    rounds: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)


def checked(prefixes: tuple[int, ...] | None, rest: int, rounds: int, store: Path | None, seed: int) -> Ask:
    """Everything that can be checked before anything is measured."""
    check_torch()
    chosen = prefixes or tuple(prefix for prefix in PREFIXES if prefix + rest <= tokens_max())
    for prefix in chosen:
        if prefix % CHUNK_TOKENS:
            raise ConfigError(f"--prefix {prefix} is no multiple of {CHUNK_TOKENS}: only whole chunks are loaded")
    longest = max(chosen, default=CHUNK_TOKENS) + rest
    if longest > tokens_max() or not chosen:
        raise ConfigError(f"prefix and rest together may have {tokens_max()} tokens with this engine, not {longest}")
    return Ask(chosen, rest, rounds, None if store is None else _checked_store(store), seed)


def _checked_store(store: Path) -> Path:
    """Whole, as a store's URL needs it."""
    if not store.is_dir():
        raise ConfigError(f"--store {store} is no folder")
    try:
        tempfile.TemporaryDirectory(dir=store, prefix="kvcore-calibrate-").cleanup()
    except OSError as error:
        raise ConfigError(f"--store {store} cannot be written to: {error.strerror or error}") from None
    return store.absolute()


def build(ask: Ask, work: Work) -> Report:
    """The report."""
    measured = Measured()
    rounds = Rounds(ask.prefixes, ask.rest, ask.seed)
    with CalibrationEngine(ask.seed, ask.store) as engine:
        work.run(_steps(ask, engine, measured, rounds))
        measured.core_share = engine.core_share
        facts = {"layers": engine.layers, "kv_bytes_per_token": engine.kv_bytes_per_token}
    measured.rounds, measured.records = rounds.done, rounds.records
    if rounds.done >= ROUNDS_LEAST:
        measured.laws = rounds.laws()
        measured.points = rounds.points(measured.laws)
    return _report(ask, measured, facts, tuple(work.missing))


def _steps(
    ask: Ask, engine: CalibrationEngine, measured: Measured, rounds: Rounds
) -> Iterator[tuple[str, Callable[[], None]]]:
    def rates() -> None:
        measured.rates = measure_rates(ask.store)

    def warm() -> None:
        for way in WAYS:
            engine.time_first_token(way, max(ask.prefixes), ask.rest)

    yield "warm up", warm
    yield "copy and L2 rates", rates
    for number in range(2 * ask.rounds):
        yield f"round {number + 1}", functools.partial(rounds.run, engine)


# ---- the report


def _report(ask: Ask, measured: Measured, facts: dict[str, int], missing: tuple[str, ...]) -> Report:
    points = measured.points
    tables = [
        Table(
            "ttft", "Predicted and measured TTFT", COLUMNS, [_row(point) for point in points], ("prefix_tokens", "way")
        ),
        _rates_table(measured),
        _break_even_table(ask, measured),
    ]
    return Report(
        "calibrate",
        "Does the cost model predict this machine?",
        tuple(_verdict(ask, measured)),
        good=_good(ask, measured),
        tables=tuple(tables),
        charts=tuple(_charts(ask, measured)),
        records=measured.records,
        inputs={"rest_tokens": ask.rest, "rounds": ask.rounds, "prefixes": list(ask.prefixes), **facts},
        notes=(
            "The engine is a small transformer on the CPU, one thread: its break-even holds for it alone.",
            "The L2's files were just written and are usually still in the operating system's cache.",
            "Not run: vLLM. This report calibrates with kvcore's own torch engine only.",
            "Seconds are those without a neighbour on the core: min(clock, max(processor, clock - time ready to run)). "
            "In the records, clock_seconds is the time by the clock.",
        ),
        missing=missing,
        seed=ask.seed,
    )


def _good(ask: Ask, measured: Measured) -> bool | None:
    """Nothing is judged where nothing was run."""
    if not measured.points:
        return None
    return all(point.holds for point in measured.points) and all(cross.holds for cross in _crossings(ask, measured))


def _row(point: Point) -> dict[str, Value]:
    return {
        "prefix_tokens": point.prefix,
        "way": point.way,
        "predicted_s": point.predicted_s,
        "measured_s": point.measured_s,
        "error": point.error,
        "spread": point.spread,
        "bar": point.bar,
        "verdict": "met" if point.holds else "missed",
    }


def _verdict(ask: Ask, measured: Measured) -> Iterator[str]:
    if not measured.points:
        yield (
            f"{measured.rounds} of {2 * ask.rounds} rounds ended; with fewer than {ROUNDS_LEAST} nothing is predicted, "
            "and nothing held against it."
        )
        return
    met = sum(point.holds for point in measured.points)
    worst = max(measured.points, key=lambda point: point.error - point.bar)
    yield (
        f"{met} of {len(measured.points)} predictions hold (error at most {ERROR_BAR:.0%} or twice the A/A spread). "
        f"Nearest to its bar or beyond is {worst.way} at {worst.prefix} tokens: error {worst.error:.0%}, "
        f"A/A spread {worst.spread:.0%}."
    )
    for cross in _crossings(ask, measured):
        said = "as the bar allows" if cross.holds else "beyond its bar"
        yield (
            f"Loading from {cross.tier} pays {_from(cross.predicted)} as predicted, {_from(cross.measured)} as "
            f"measured: {said}."
        )
    if measured.core_share < IDLE_SHARE:
        yield (
            f"This machine was not idle: neighbours had the core for {1 - measured.core_share:.0%} of the time. "
            "Waits for a core are left out of all figures here; what neighbours do to its caches is not."
        )


def _from(tokens: int | None) -> str:
    return "at no length tried" if tokens is None else f"from {tokens} tokens on"


@dataclass(frozen=True, slots=True)
class Crossing:
    """The break-even of a tier in whole chunks, since nothing else is ever loaded; None: at no length tried. `low` and
    `high`: with loaded requests faster and slower by `bar`. `shortest` and `longest`: of the lengths that were tried;
    below and beyond them nobody has looked."""

    tier: Way
    predicted: int | None
    low: int | None
    high: int | None
    measured: int | None
    bar: float
    shortest: int
    longest: int

    @property
    def holds(self) -> bool:
        """A measured one between low and high; where there is none, high is beyond what was tried."""
        low, high = (math.inf if at is None else at for at in (self.low, self.high))
        if self.measured is None:
            return high > self.longest
        return low <= self.measured <= max(high, self.shortest)


def _crossings(ask: Ask, measured: Measured) -> list[Crossing]:
    return [_crossing(ask, measured, tier) for tier in TIERS] if measured.points else []


def _crossing(ask: Ask, measured: Measured, tier: Way) -> Crossing:
    bar = bar_of(statistics.median(point.spread for point in measured.points if point.way == tier))
    found = measured_break_even(_curve(measured, "recompute"), _curve(measured, tier))
    low, middle, high = (_predicted(ask, measured, tier, factor) for factor in (1 - bar, 1.0, 1 + bar))
    whole = None if found is None else math.ceil(found / CHUNK_TOKENS) * CHUNK_TOKENS
    return Crossing(tier, middle, low, high, whole, bar, min(ask.prefixes), max(ask.prefixes))


def _predicted(ask: Ask, measured: Measured, tier: Way, load_factor: float) -> int | None:
    assert measured.laws is not None
    longest = (tokens_max() - ask.rest) // CHUNK_TOKENS * CHUNK_TOKENS
    return measured.laws.break_even_tokens(tier, ask.rest, CHUNK_TOKENS, longest, load_factor)


def _curve(measured: Measured, way: Way) -> list[tuple[int, float]]:
    return [(point.prefix, point.measured_s) for point in measured.points if point.way == way]


def _break_even_table(ask: Ask, measured: Measured) -> Table:
    columns = (
        Column("tier", "Loaded from"),
        Column("predicted_tokens", "Predicted break-even", "count", "in whole chunks"),
        Column(
            "measured_tokens",
            "Measured break-even",
            "count",
            "crossing of the measured curves, straight between points, up to the next whole chunk",
        ),
        Column("bar", "Bar", "share", f"max({ERROR_BAR:.0%}, 2 * the median A/A spread of this tier's runs)"),
        Column("low_tokens", "Faster by the bar", "count", "predicted, with loaded requests so much faster"),
        Column("high_tokens", "Slower by the bar", "count", "predicted, with loaded requests so much slower"),
        Column("verdict", "Verdict", "verdict", "met: the measured one may lie between the last two"),
    )
    rows: list[dict[str, Value]] = [
        {
            "tier": cross.tier,
            "predicted_tokens": cross.predicted,
            "measured_tokens": cross.measured,
            "bar": cross.bar,
            "low_tokens": cross.low,
            "high_tokens": cross.high,
            "verdict": "met" if cross.holds else "missed",
        }
        for cross in _crossings(ask, measured)
    ]
    return Table("break_even", "Break-even, predicted and measured", columns, rows, ("tier",))


def _rates_table(measured: Measured) -> Table:
    """What was measured of this machine, by name."""
    columns = (
        Column("name", "Measured"),
        Column("value", "Value"),
        Column("raw", "Raw", "number", "in s, B/s or as a share"),
    )
    rows: list[dict[str, Value]] = [{"name": name, "value": text, "raw": raw} for name, text, raw in _rates(measured)]
    return Table("rates", "This machine", columns, rows, ("name",))


def _rates(measured: Measured) -> Iterator[tuple[str, str, float]]:
    rates, laws = measured.rates, measured.laws
    if rates:
        yield "copy of memory", words.rate(rates.copy_Bps), rates.copy_Bps
        yield "copy of one 4 KiB block", words.seconds(rates.block_s), rates.block_s
        yield "L2, many chunks of 1 MiB", words.rate(rates.l2_Bps), rates.l2_Bps
        yield "L2, one chunk of 1 MiB", words.seconds(rates.l2_latency_s), rates.l2_latency_s
    if laws:
        whole, after = laws.prefill.whole, laws.prefill.after
        yield "prefill, fixed", words.seconds(whole.fixed_s), whole.fixed_s
        yield "prefill, per token", words.seconds(whole.token_s), whole.token_s
        yield "prefill, per 1,000 pairs", words.seconds(1000 * whole.pair_s), 1000 * whole.pair_s
        yield "rest after a prefix, fixed", words.seconds(after.wait_s), after.wait_s
        yield "rest after a prefix, per token of it", words.seconds(after.token_s), after.token_s
        for tier, line in laws.loads.items():
            yield f"load from {tier}, fixed", words.seconds(line.wait_s), line.wait_s
            yield f"load from {tier}, per token", words.seconds(line.token_s), line.token_s
    yield "share of the time that was ours", f"{measured.core_share:.0%}", measured.core_share


def _charts(ask: Ask, measured: Measured) -> Iterator[Lines]:
    laws = measured.laws
    if laws is None or not measured.points:
        return
    series = []
    for way in WAYS:
        curve = _curve(measured, way)
        series.append(Series(f"{way}, measured", [at for at, _ in curve], [1000 * s for _, s in curve], points=True))
        predicted = [1000 * laws.ttft_s(way, prefix, ask.rest) for prefix, _ in curve]
        series.append(Series(f"{way}, predicted", [at for at, _ in curve], predicted, dashed=True))
    marks = [(cross.tier, cross.measured) for cross in _crossings(ask, measured)]
    yield Lines(
        "ttft_measured",
        "TTFT by prefix length, predicted and measured",
        "Prefix length, tokens",
        "TTFT, ms",
        tuple(series),
        marks=tuple(Mark(at, f"{tier} pays") for tier, at in marks if at is not None),
        note=f"{ask.rest} new tokens after the prefix; {measured.rounds} rounds, in each every run once.",
    )
