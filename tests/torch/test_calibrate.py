"""Calibration: the engine answers the same both ways, laws are found again, and a prediction is judged by its bar."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="calibration runs a real transformer: make test installs torch")

from kvcore.errors import ConfigError  # noqa: E402
from kvcore.reports.breakeven import LineLoad  # noqa: E402
from kvcore.reports.calibration import engine as engine_module  # noqa: E402
from kvcore.reports.calibration.engine import CHUNK_TOKENS, CalibrationEngine, MeasuringBug  # noqa: E402
from kvcore.reports.calibration.prediction import (  # noqa: E402
    Laws,
    Point,
    fit_laws,
    halves,
    measured_break_even,
)
from kvcore.reports.kinds import calibrate  # noqa: E402
from kvcore.reports.page import Work  # noqa: E402
from kvcore.reports.prefill import PrefillTerms  # noqa: E402

LAWS = Laws(PrefillTerms(1e-3, 2e-5, 3e-8), {"L1": LineLoad(2e-3, 1e-6), "L2": LineLoad(1e-2, 1e-5)})
LENGTHS = (16, 48, 96, 144, 208, 304, 416, 496)


def small() -> calibrate.Ask:
    return calibrate.Ask(prefixes=(32, 96), rest=16, rounds=3)


def test_the_first_token_is_the_same_however_the_kv_came(tmp_path: Path) -> None:
    with CalibrationEngine(5, tmp_path) as engine:
        tokens = {way: engine.time_first_token(way, 96, 20)[1] for way in calibrate.WAYS}
    assert len(set(tokens.values())) == 1
    assert any(tmp_path.rglob("*")), "the L2 is a store of files"


def test_loaded_bytes_that_are_wrong_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks in the wrong order: full attention hardly minds, the bytes do."""
    with CalibrationEngine(5, tmp_path) as engine:
        honest = engine._cache.retrieve

        def swapped(tokens: tuple[int, ...]) -> list[bytes]:
            chunks = honest(tokens)
            return [chunks[-1], *chunks[1:-1], chunks[0]]

        monkeypatch.setattr(engine._cache, "retrieve", swapped)
        with pytest.raises(MeasuringBug, match="differs from what was computed"):
            calibrate._run_both(small(), engine, calibrate.Measured(laws=LAWS), 96)


def test_chunks_that_are_gone_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CalibrationEngine(5, tmp_path) as engine:
        monkeypatch.setattr(engine._cache, "retrieve", lambda tokens: [])
        with pytest.raises(MeasuringBug, match="6 chunks were stored, 0 came back"):
            engine.time_load("L1", 6 * CHUNK_TOKENS)


def test_a_report_has_every_point_its_error_and_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TRIES_MAX", 1)
    report = calibrate.build(small(), Work(lambda line: None))
    rows = report.tables[0].rows
    assert [(row["prefix_tokens"], row["way"]) for row in rows] == [
        (prefix, way) for prefix in (32, 96) for way in calibrate.WAYS
    ]
    for row in rows:
        predicted, measured = row["predicted_s"], row["measured_s"]
        assert isinstance(predicted, float)
        assert isinstance(measured, float)
        assert row["error"] == pytest.approx(abs(predicted / measured - 1))
        assert row["bar"] == pytest.approx(max(0.15, 2 * float(row["spread"] or 0)))
        assert row["verdict"] == ("met" if float(row["error"] or 0) <= float(row["bar"] or 0) else "missed")
    assert report.good in (None, all(row["verdict"] == "met" for row in rows))
    names = {row["name"] for row in report.tables[1].rows}
    assert {"copy of memory", "L2, many chunks of 1 MiB", "prefill, per token", "load from L2, fixed"} <= names
    runs = [record for record in report.records if "run" in record]
    assert len(runs) == 2 * 3 * 2 * small().rounds


def test_an_interrupt_while_measuring_predicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(CalibrationEngine, "time_prefill", stop)
    monkeypatch.setattr(calibrate, "measure_rates", lambda store: None)
    report = calibrate.build(small(), Work(lambda line: None))
    assert report.missing[0] == "prefill speed"
    assert report.missing[-1] == "both ways, prefix 96"
    assert report.good is None
    assert report.verdict[0].startswith("Nothing was run")


# ---- the arithmetic


def test_laws_are_found_again_from_what_follows_them() -> None:
    prefills = [(new, prefix, LAWS.prefill.seconds(new, prefix)) for new, prefix in ((n, 0) for n in LENGTHS)]
    prefills += [(16, prefix, LAWS.prefill.seconds(16, prefix)) for prefix in LENGTHS[:-1]]
    loads = {tier: [(tokens, law.seconds(tokens)) for tokens in LENGTHS] for tier, law in LAWS.loads.items()}
    found = fit_laws(prefills, loads)
    for way in ("recompute", "L1", "L2"):
        assert found.ttft_s(way, 256, 16) == pytest.approx(LAWS.ttft_s(way, 256, 16))
    assert found.break_even_tokens("L1", 16, 16, 496) == LAWS.break_even_tokens("L1", 16, 16, 496)


def test_the_measured_break_even_is_where_the_curves_cross_for_good() -> None:
    recompute = [(32, 1.0), (64, 2.0), (128, 4.0)]
    assert measured_break_even(recompute, [(32, 3.0), (64, 3.0), (128, 3.0)]) == pytest.approx(96.0)
    assert measured_break_even(recompute, [(32, 5.0), (64, 5.0), (128, 5.0)]) is None
    assert measured_break_even(recompute, [(32, 0.5), (64, 0.5), (128, 0.5)]) == 32.0
    assert measured_break_even(recompute, [(32, 0.5), (64, 2.5), (128, 3.5)]) == pytest.approx(96.0)


def test_a_prediction_is_judged_by_the_larger_of_its_two_bars() -> None:
    calm = Point("L1", 32, predicted_s=1.14, a_s=1.0, a_again_s=1.0, runs=14, drift=0.0)
    assert calm.holds
    off = Point("L1", 32, predicted_s=1.16, a_s=1.0, a_again_s=1.0, runs=14, drift=0.0)
    assert not off.holds
    noisy = Point("L1", 32, predicted_s=1.3, a_s=1.0, a_again_s=1.2, runs=14, drift=0.0)
    assert noisy.spread == pytest.approx(0.2)
    assert noisy.holds
    drifting = Point("L1", 32, predicted_s=1.3, a_s=1.0, a_again_s=1.0, runs=14, drift=0.16)
    assert drifting.bar == pytest.approx(0.32)


@pytest.mark.parametrize(("error", "core_share", "good"), [(0.1, 1.0, True), (0.9, 1.0, False), (0.9, 0.2, None)])
def test_on_a_machine_that_the_neighbours_had_nothing_is_judged(
    error: float, core_share: float, good: bool | None
) -> None:
    point = Point("L1", 32, predicted_s=1.0 + error, a_s=1.0, a_again_s=1.0, runs=14, drift=0.0)
    assert calibrate._good(calibrate.Measured(points=[point], core_share=core_share)) is good
    assert calibrate._good(calibrate.Measured()) is None


def test_halves_are_every_second_run() -> None:
    assert halves([1.0, 10.0, 2.0, 20.0, 3.0, 30.0]) == (2.0, 20.0)


def test_prefixes_must_be_whole_chunks_that_the_engine_can_hold() -> None:
    with pytest.raises(ConfigError, match="no multiple of 16"):
        calibrate.checked((20,), 16, 7, None, 0)
    with pytest.raises(ConfigError, match="may have 512 tokens"):
        calibrate.checked(None, 512, 7, None, 0)


def test_break_evens_are_compared_in_whole_chunks_and_with_what_the_bar_allows() -> None:
    """Runs that come out exactly as predicted cross where the laws do; a bar's worth of error moves that far."""
    ask = calibrate.Ask()
    points = [
        Point(way, prefix, seconds, seconds, seconds, 14, 0.0)
        for way in calibrate.WAYS
        for prefix in ask.prefixes
        for seconds in [LAWS.ttft_s(way, prefix, ask.rest)]
    ]
    rows = calibrate._break_even_table(ask, calibrate.Measured(laws=LAWS, points=points)).rows
    low, predicted, high = (rows[0][name] for name in ("low_tokens", "predicted_tokens", "high_tokens"))
    assert int(str(low)) < int(str(predicted)) < int(str(high))
    assert rows[1]["high_tokens"] is None, "so much slower, L2 pays at no length tried"
    measured = rows[0]["measured_tokens"]
    assert isinstance(measured, int)
    assert measured % CHUNK_TOKENS == 0
    assert abs(measured - int(str(predicted))) <= CHUNK_TOKENS
