"""`kvcore report calibrate`: measure this machine, predict, then run both ways and hold one against the other.

The engine is the ladder's small transformer in torch on the CPU (reports/calibration/engine.py), so the *break-even in
tokens* is this engine's and nobody else's; what is shown is that the cost model, fed with measured pieces, predicts
what a real engine with a real cache does. Loads come from L1 and from a file L2.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.calibration.engine import (
    CHUNK_TOKENS,
    CalibrationEngine,
    MeasuringBug,
    Way,
    check_torch,
    tokens_max,
)
from kvcore.reports.calibration.prediction import ERROR_BAR, Laws, Point, fit_laws, halves, measured_break_even
from kvcore.reports.calibration.rates import Rates, measure_rates
from kvcore.reports.page import Column, Lines, Mark, Report, Series, Table, Value, Work, words

TIERS: tuple[Way, ...] = ("L1", "L2")
WAYS: tuple[Way, ...] = ("recompute", *TIERS)
PREFIXES = (32, 64, 112, 176, 256, 352, 480)
PIECES = (16, 48, 96, 144, 208, 304, 416, 496)
DRIFT_TOKENS = 208  # the prefill that is timed in both phases
WARM_ROUNDS = 2
DECIMALS = 9
IDLE_SHARE, JUDGED_SHARE = 0.9, 0.5

COLUMNS = (
    Column("prefix_tokens", "Prefix", "count"),
    Column("way", "Way"),
    Column("predicted_s", "Predicted TTFT", "seconds", "from the laws fitted to the measured pieces"),
    Column("measured_s", "Measured TTFT", "seconds", "mean of the medians of the two halves, A and A'"),
    Column("error", "Error", "share", "|predicted / measured - 1|"),
    Column("spread", "A/A spread", "share", "max(|A - A'| / A, drift between measuring the pieces and running)"),
    Column("bar", "Bar", "share", f"max({ERROR_BAR:.0%}, 2 * A/A spread)"),
    Column("verdict", "Verdict", "verdict"),
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
    prefills: list[tuple[int, int, float]] = field(default_factory=list)
    loads: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    laws: Laws | None = None
    reference_s: float = 0.0
    drift: float = 0.0
    points: list[Point] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


def checked(prefixes: tuple[int, ...] | None, rest: int, rounds: int, store: Path | None, seed: int) -> Ask:
    """Everything that can be checked before anything is measured."""
    check_torch()
    chosen = prefixes or tuple(prefix for prefix in PREFIXES if prefix + rest <= tokens_max())
    for prefix in chosen:
        if prefix % CHUNK_TOKENS:
            raise ConfigError(f"--prefix {prefix} is no multiple of {CHUNK_TOKENS}: only whole chunks are loaded")
    longest = max(chosen, default=0) + rest
    if longest > tokens_max() or not chosen:
        raise ConfigError(f"prefix and rest together may have {tokens_max()} tokens with this engine, not {longest}")
    if store is not None and not store.is_dir():
        raise ConfigError(f"--store {store} is no folder")
    return Ask(chosen, rest, rounds, store, seed)


def build(ask: Ask, work: Work) -> Report:
    """The report."""
    measured = Measured()
    with CalibrationEngine(ask.seed, ask.store) as engine:
        work.run(_pieces(ask, engine, measured))
        if measured.prefills and all(measured.loads.values()) and not work.interrupted:
            measured.laws = fit_laws(measured.prefills, measured.loads)
        work.run(_runs(ask, engine, measured))
        measured.core_share = engine.core_share
        facts = {"layers": engine.layers, "kv_bytes_per_token": engine.kv_bytes_per_token}
    return _report(ask, measured, facts, tuple(work.missing))


# ---- measuring


def _pieces(ask: Ask, engine: CalibrationEngine, measured: Measured) -> Iterator[tuple[str, Callable[[], None]]]:
    def rates() -> None:
        measured.rates = measure_rates(ask.store)

    def warm() -> None:
        for way in WAYS:
            for _ in range(WARM_ROUNDS):
                engine.time_first_token(way, PREFIXES[-1], min(ask.rest, 16))

    yield "warm up", warm
    yield "copy and L2 rates", rates
    yield "prefill speed", functools.partial(_measure_prefills, ask, engine, measured)
    for tier in TIERS:
        yield f"loads from {tier}", functools.partial(_measure_loads, ask, engine, measured, tier)


def _measure_prefills(ask: Ask, engine: CalibrationEngine, measured: Measured) -> None:
    """Whole prompts of the lengths of `PIECES`, and the rest after prefixes; in rounds, so that no length has the worst
    of the machine."""
    whole = [(new, 0) for new in PIECES]
    after = [(ask.rest, prefix) for prefix in PIECES if prefix + ask.rest <= tokens_max()]
    shapes = [*whole, *after]
    rounds = [[engine.time_prefill(new, prefix) for new, prefix in shapes] for _ in range(2 * ask.rounds)]
    times = [statistics.median(column) for column in zip(*rounds)]
    measured.prefills = [(new, prefix, seconds) for (new, prefix), seconds in zip(shapes, times, strict=True)]
    measured.reference_s = times[PIECES.index(DRIFT_TOKENS)]
    measured.records += [
        {"piece": "prefill", "new_tokens": new, "prefix_tokens": prefix, "seconds": round(seconds, DECIMALS)}
        for new, prefix, seconds in measured.prefills
    ]


def _measure_loads(ask: Ask, engine: CalibrationEngine, measured: Measured, tier: Way) -> None:
    rounds = [[engine.time_load(tier, tokens) for tokens in PIECES] for _ in range(2 * ask.rounds)]
    times = [statistics.median(column) for column in zip(*rounds)]
    measured.loads[tier] = list(zip(PIECES, times, strict=True))
    measured.records += [
        {"piece": tier, "tokens": tokens, "seconds": round(seconds, DECIMALS)}
        for tokens, seconds in measured.loads[tier]
    ]


def _runs(ask: Ask, engine: CalibrationEngine, measured: Measured) -> Iterator[tuple[str, Callable[[], None]]]:
    def drift() -> None:
        again = statistics.median([engine.time_prefill(DRIFT_TOKENS, 0) for _ in range(2 * ask.rounds)])
        measured.drift = abs(again / measured.reference_s - 1) if measured.reference_s else 0.0

    if measured.laws is None:
        yield from ((f"both ways, prefix {prefix}", _nothing) for prefix in ask.prefixes)
        return
    yield "the machine's drift", drift
    for prefix in ask.prefixes:
        yield f"both ways, prefix {prefix}", functools.partial(_run_both, ask, engine, measured, prefix)


def _nothing() -> None:
    raise MeasuringBug("the pieces were not measured")  # only named as missing, never called


def _run_both(ask: Ask, engine: CalibrationEngine, measured: Measured, prefix: int) -> None:
    """All ways in turn, `rounds` times for each half, and the same first token every time."""
    assert measured.laws is not None
    times: dict[Way, list[float]] = {way: [] for way in WAYS}
    tokens = set()
    for number in range(2 * ask.rounds):
        for way in WAYS:
            seconds, token = engine.time_first_token(way, prefix, ask.rest)
            times[way].append(seconds)
            tokens.add(token)
            measured.records.append(
                {"run": number, "way": way, "prefix_tokens": prefix, "seconds": round(seconds, DECIMALS)}
            )
    if len(tokens) != 1:
        raise MeasuringBug(f"the first token depends on how the KV came: {sorted(tokens)}")
    for way in WAYS:
        predicted = measured.laws.ttft_s(way, prefix, ask.rest)
        a, again = halves(times[way])
        measured.points.append(Point(way, prefix, predicted, a, again, len(times[way]), measured.drift))


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
        good=_good(measured),
        tables=tuple(tables),
        charts=tuple(_charts(ask, measured)),
        records=measured.records,
        inputs={"rest_tokens": ask.rest, "rounds": ask.rounds, "prefixes": list(ask.prefixes), **facts},
        notes=(
            "The engine is a small transformer on the CPU, one thread: its break-even holds for it alone.",
            "The L2's files were just written and are usually still in the operating system's cache.",
            "Not run: vLLM. This report calibrates with kvcore's own torch engine only.",
        ),
        missing=missing,
        seed=ask.seed,
    )


def _good(measured: Measured) -> bool | None:
    """Nothing is judged where nothing was run, or where the neighbours had most of the machine."""
    if not measured.points or measured.core_share < JUDGED_SHARE:
        return None
    return all(point.holds for point in measured.points)


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
        yield "Nothing was run: the pieces alone predict, and nothing holds the prediction against anything."
        return
    met = sum(point.holds for point in measured.points)
    worst = max(measured.points, key=lambda point: point.error - point.bar)
    yield (
        f"{met} of {len(measured.points)} predictions hold (error at most {ERROR_BAR:.0%} or twice the A/A spread). "
        f"Nearest to its bar or beyond is {worst.way} at {worst.prefix} tokens: error {worst.error:.0%}, "
        f"A/A spread {worst.spread:.0%}."
    )
    if measured.core_share < IDLE_SHARE:
        yield (
            f"This machine was not idle: the prefills had {measured.core_share:.0%} of a core, so these figures "
            "are about its neighbours too; below half of a core nothing is judged."
        )
    for tier in TIERS:
        predicted, found = _break_evens(ask, measured, tier)
        yield f"Loading from {tier} pays {_from(predicted)} as predicted, {_from(found)} as measured."


def _from(tokens: float | None) -> str:
    return "at no length tried" if tokens is None else f"from {tokens:.0f} tokens on"


def _break_evens(ask: Ask, measured: Measured, tier: Way) -> tuple[int | None, int | None]:
    """Predicted and measured; both in whole chunks, since nothing else is ever loaded."""
    found = measured_break_even(_curve(measured, "recompute"), _curve(measured, tier))
    return _predicted(ask, measured, tier), None if found is None else math.ceil(found / CHUNK_TOKENS) * CHUNK_TOKENS


def _predicted(ask: Ask, measured: Measured, tier: Way, load_factor: float = 1.0) -> int | None:
    assert measured.laws is not None
    longest = (tokens_max() - ask.rest) // CHUNK_TOKENS * CHUNK_TOKENS
    return measured.laws.break_even_tokens(tier, ask.rest, CHUNK_TOKENS, longest, load_factor)


def _curve(measured: Measured, way: Way) -> list[tuple[int, float]]:
    return [(point.prefix, point.measured_s) for point in measured.points if point.way == way]


def _break_even_table(ask: Ask, measured: Measured) -> Table:
    columns = (
        Column("tier", "Loaded from"),
        Column("predicted_tokens", "Predicted break-even", "count", "in whole chunks"),
        Column("low_tokens", "Loads faster by the bar", "count", f"the same with loads {ERROR_BAR:.0%} faster"),
        Column("high_tokens", "Slower by the bar", "count", f"the same with loads {ERROR_BAR:.0%} slower"),
        Column(
            "measured_tokens",
            "Measured break-even",
            "count",
            "crossing of the measured curves, straight between points, up to the next whole chunk",
        ),
    )
    rows: list[dict[str, Value]] = []
    for tier in TIERS if measured.points else ():
        predicted, found = _break_evens(ask, measured, tier)
        low, high = (_predicted(ask, measured, tier, 1 + sign * ERROR_BAR) for sign in (-1, 1))
        row: dict[str, Value] = {"tier": tier, "predicted_tokens": predicted, "measured_tokens": found}
        rows.append({**row, "low_tokens": low, "high_tokens": high})
    return Table("break_even", "Break-even, predicted and measured", columns, rows, ("tier",))


def _rates_table(measured: Measured) -> Table:
    """What was measured of this machine, by name."""
    columns = (Column("name", "Measured"), Column("value", "Value"), Column("raw", "Raw", "number"))
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
        prefill = laws.prefill
        yield "prefill, fixed", words.seconds(prefill.fixed_s), prefill.fixed_s
        yield "prefill, per token", words.seconds(prefill.token_s), prefill.token_s
        yield "prefill, per 1,000 pairs", words.seconds(1000 * prefill.pair_s), 1000 * prefill.pair_s
        for tier, line in laws.loads.items():
            yield f"load from {tier}, fixed", words.seconds(line.wait_s), line.wait_s
            yield f"load from {tier}, per token", words.seconds(line.token_s), line.token_s
        yield "drift of a prefill between the phases", f"{measured.drift:.1%}", measured.drift
    yield "share of a core that the prefills had", f"{measured.core_share:.0%}", measured.core_share


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
    marks = [(tier, _break_evens(ask, measured, tier)[1]) for tier in TIERS]
    yield Lines(
        "ttft_measured",
        "TTFT by prefix length, predicted and measured",
        "Prefix length, tokens",
        "TTFT, ms",
        tuple(series),
        marks=tuple(Mark(at, f"{tier} pays") for tier, at in marks if at is not None),
        note=f"{ask.rest} new tokens after the prefix; {2 * ask.rounds} runs of each way, interleaved.",
    )
