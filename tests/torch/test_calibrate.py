"""Calibration: the engine answers the same both ways, laws are found again, and a prediction is judged by its bar."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="calibration runs a real transformer: make test installs torch")

from kvcore.errors import ConfigError, OutOfRoomError  # noqa: E402
from kvcore.reports.breakeven import LineLoad  # noqa: E402
from kvcore.reports.calibration import engine as engine_module  # noqa: E402
from kvcore.reports.calibration import rounds as rounds_module  # noqa: E402
from kvcore.reports.calibration.engine import CHUNK_TOKENS, CalibrationEngine, MeasuringBug  # noqa: E402
from kvcore.reports.calibration.prediction import (  # noqa: E402
    EnginePrefill,
    Laws,
    Point,
    fit_laws,
    halves,
    measured_break_even,
)
from kvcore.reports.calibration.rounds import TIERS, WAYS, Rounds, Shape  # noqa: E402
from kvcore.reports.calibration.stopwatch import timed, without_neighbours  # noqa: E402
from kvcore.reports.kinds import calibrate  # noqa: E402
from kvcore.reports.page import Work  # noqa: E402
from kvcore.reports.prefill import PrefillTerms  # noqa: E402

PREFILL = EnginePrefill(PrefillTerms(1e-3, 2e-5, 3e-8), LineLoad(1.2e-3, 1e-6))
LAWS = Laws(PREFILL, {"L1": LineLoad(2e-3, 1e-6), "L2": LineLoad(1e-2, 1e-5)})
LENGTHS = (16, 48, 96, 144, 208, 304, 416, 496)


def small() -> calibrate.Ask:
    return calibrate.Ask(prefixes=(32, 96), rest=16, rounds=3)


def test_the_first_token_is_the_same_however_the_kv_came(tmp_path: Path) -> None:
    with CalibrationEngine(5, tmp_path) as engine:
        tokens = {way: engine.time_first_token(way, 96, 20)[1] for way in WAYS}
        assert any(path.is_file() for path in tmp_path.rglob("*")), "the L2 is a store of files"
    assert len(set(tokens.values())) == 1
    assert list(tmp_path.iterdir()) == [], "nothing of ours stays in somebody's folder"


def test_a_store_is_named_in_any_way_that_a_folder_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, and with what a URL gives a meaning to. The L2 was given the text, as if it were one."""
    monkeypatch.chdir(tmp_path)
    Path("é #?%41").mkdir()
    ask = calibrate.checked((32,), 16, 3, Path("é #?%41"), 5)
    assert ask.store == tmp_path / "é #?%41"
    with CalibrationEngine(5, ask.store) as engine:
        assert engine.time_load("L2", 32).seconds > 0


def test_without_a_prefix_that_fits_the_shortest_is_what_is_too_long() -> None:
    with pytest.raises(ConfigError, match="may have 512 tokens with this engine, not 528"):
        calibrate.checked(None, 512, 3, None, 5)


def test_a_store_that_takes_nothing_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        calibrate.checked((32,), 16, 3, tmp_path / "file", 5)
    if Path("/proc/self").is_dir():  # where nobody can write, not even root
        with pytest.raises(ConfigError, match="cannot be written to"):
            calibrate.checked((32,), 16, 3, Path("/proc/self"), 5)


def test_a_store_without_room_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file store on a full disk refuses what it cannot keep; L1 has it all, so only L2 is asked."""

    write, room = os.pwritev, 4096

    def no_room(fd: int, parts: list[memoryview], offset: int) -> int:
        if sum(map(len, parts)) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", no_room)
    with pytest.raises(OutOfRoomError, match="has kept 0 of 32 chunks: is the disk under --store full"):
        CalibrationEngine(5)


def test_loaded_bytes_that_are_wrong_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks in the wrong order: full attention hardly minds, the bytes do."""
    with CalibrationEngine(5, tmp_path) as engine:
        honest = engine._cache.retrieve

        def swapped(tokens: tuple[int, ...]) -> list[bytes]:
            chunks = honest(tokens)
            return [chunks[-1], *chunks[1:-1], chunks[0]]

        monkeypatch.setattr(engine._cache, "retrieve", swapped)
        with pytest.raises(MeasuringBug, match="differs from what was computed"):
            Rounds((96,), 16, 0)._time(engine, Shape("run", "L1", 96, 16))


def test_chunks_that_are_gone_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CalibrationEngine(5, tmp_path) as engine:
        monkeypatch.setattr(engine._cache, "retrieve", lambda tokens: [])
        with pytest.raises(MeasuringBug, match="6 chunks were stored, 0 came back"):
            engine.time_load("L1", 6 * CHUNK_TOKENS)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One try of each thing: what is tested is not how good the figures are."""
    monkeypatch.setattr(engine_module, "TRIES_LEAST", 1)
    monkeypatch.setattr(engine_module, "TRIES_MAX", 1)


def test_a_report_has_every_point_its_error_and_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    report = calibrate.build(small(), Work(lambda line: None))
    rows = report.tables[0].rows
    assert [(row["prefix_tokens"], row["way"]) for row in rows] == [
        (prefix, way) for prefix in (32, 96) for way in WAYS
    ]
    for row in rows:
        predicted, measured = row["predicted_s"], row["measured_s"]
        assert isinstance(predicted, float)
        assert isinstance(measured, float)
        assert row["error"] == pytest.approx(abs(predicted / measured - 1))
        assert row["bar"] == pytest.approx(max(0.15, 2 * float(row["spread"] or 0)))
        assert row["verdict"] == ("met" if float(row["error"] or 0) <= float(row["bar"] or 0) else "missed")
    judged = [row["verdict"] for table in report.tables for row in table.rows if "verdict" in row]
    assert report.good is all(verdict == "met" for verdict in judged)
    names = {row["name"] for row in report.tables[1].rows}
    assert {"copy of memory", "L2, many chunks of 1 MiB", "prefill, per token", "load from L2, fixed"} <= names
    runs = [record for record in report.records if record["kind"] == "run"]
    assert len(runs) == 2 * 3 * 2 * small().rounds
    assert all(0 < record["seconds"] <= record["clock_seconds"] for record in report.records)


@pytest.mark.parametrize(("whole", "said"), [(1, "1 of 6 rounds ended"), (3, "of 6 predictions hold")])
def test_an_interrupt_keeps_the_rounds_that_are_whole(monkeypatch: pytest.MonkeyPatch, whole: int, said: str) -> None:
    quick(monkeypatch)
    honest = CalibrationEngine.time_load
    shapes = len([shape for shape in Rounds((32, 96), 16, 0)._shapes() if shape.kind == "load"])
    calls: list[int] = []

    def stop(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > whole * shapes:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(CalibrationEngine, "time_load", stop)
    monkeypatch.setattr(calibrate, "measure_rates", lambda store: None)
    report = calibrate.build(small(), Work(lambda line: None))
    assert report.missing == tuple(f"round {number + 1}" for number in range(whole, 6))
    assert said in report.verdict[0]
    assert {record["round"] for record in report.records} == set(range(whole))
    assert (report.good is None) == (whole == 1)


# ---- the stopwatch


@pytest.mark.parametrize(
    ("clock_s", "processor_s", "ready_s", "seconds"),
    [
        (5.0, 1.0, 0.0, 5.0),  # alone: the clock, with every wait for a store
        (5.0, 2.0, 3.0, 2.0),  # a neighbour had the core for the rest
        (5.0, 2.0, 9.0, 2.0),  # more was booked than this work can have waited
        (5.0, 1.0, 2.0, 3.0),  # a neighbour and a store
        (5.0, 6.0, 0.0, 5.0),  # two threads at once
    ],
)
def test_time_is_counted_without_the_neighbours(
    clock_s: float, processor_s: float, ready_s: float, seconds: float
) -> None:
    assert without_neighbours(clock_s, processor_s, ready_s) == seconds


def test_what_drifts_with_the_rounds_drifts_for_pieces_and_runs_alike() -> None:
    """Every round twice as slow as the one before: predictions from medians of the same rounds still hold."""
    rounds = Rounds((64, 256), 16, 0)
    for number in range(7):
        for shape in rounds._shapes():
            exact = {
                "prefill": PREFILL.seconds(shape.new, shape.prefix),
                "load": LAWS.loads.get(shape.way, LAWS.loads["L1"]).seconds(shape.prefix) - 1e-4,
                "call after load": 3e-4,
                "call at rest": 2e-4,
                "run": LAWS.ttft_s(shape.way, shape.prefix, shape.new),
            }[shape.kind]
            rounds.times.setdefault(shape, []).append(exact * 2**number)
    for point in rounds.points(rounds.laws()):
        assert point.predicted_s == pytest.approx(8 * LAWS.ttft_s(point.way, point.prefix, 16), rel=1e-3)


def test_a_round_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[Shape]] = [[], []]
    rounds = Rounds((64,), 16, 0)

    def note(self: Rounds, engine: object, shape: Shape) -> Any:
        orders[rounds.done].append(shape)
        return timed(lambda: None)

    monkeypatch.setattr(rounds_module.Rounds, "_time", note)
    for _ in orders:
        rounds.run(None)  # type: ignore[arg-type]
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1]) == set(rounds.times)


# ---- the arithmetic


def test_laws_are_found_again_from_what_follows_them() -> None:
    whole = [(new, PREFILL.seconds(new)) for new in LENGTHS]
    after = [(prefix, PREFILL.seconds(16, prefix)) for prefix in LENGTHS]
    loads = {tier: [(tokens, law.seconds(tokens) - 1e-4) for tokens in LENGTHS] for tier, law in LAWS.loads.items()}
    found = fit_laws(whole, after, loads, dict.fromkeys(TIERS, 1e-4))
    for way in WAYS:
        assert found.ttft_s(way, 256, 16) == pytest.approx(LAWS.ttft_s(way, 256, 16))
    assert found.break_even_tokens("L1", 16, 16, 496) == LAWS.break_even_tokens("L1", 16, 16, 496)


def test_the_measured_break_even_is_where_the_curves_cross_for_good() -> None:
    recompute = [(32, 1.0), (64, 2.0), (128, 4.0)]
    assert measured_break_even(recompute, [(32, 3.0), (64, 3.0), (128, 3.0)]) == pytest.approx(96.0)
    assert measured_break_even(recompute, [(32, 5.0), (64, 5.0), (128, 5.0)]) is None
    assert measured_break_even(recompute, [(32, 0.5), (64, 0.5), (128, 0.5)]) == 32.0
    assert measured_break_even(recompute, [(32, 0.5), (64, 2.5), (128, 3.5)]) == pytest.approx(96.0)


def test_a_prediction_is_judged_by_the_larger_of_its_two_bars() -> None:
    calm = Point("L1", 32, predicted_s=1.14, a_s=1.0, a_again_s=1.0, runs=14)
    assert calm.holds
    off = Point("L1", 32, predicted_s=1.16, a_s=1.0, a_again_s=1.0, runs=14)
    assert not off.holds
    noisy = Point("L1", 32, predicted_s=1.3, a_s=1.0, a_again_s=1.2, runs=14)
    assert noisy.spread == pytest.approx(0.2)
    assert noisy.holds
    assert not Point("L1", 32, predicted_s=1.6, a_s=1.0, a_again_s=1.2, runs=14).holds


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
        Point(way, prefix, seconds, seconds, seconds, 14)
        for way in WAYS
        for prefix in ask.prefixes
        for seconds in [LAWS.ttft_s(way, prefix, ask.rest)]
    ]
    measured = calibrate.Measured(laws=LAWS, points=points)
    near, far = calibrate._crossings(ask, measured)
    assert near.low is not None
    assert near.predicted is not None
    assert near.high is not None
    assert near.measured is not None
    assert near.low < near.predicted < near.high
    assert near.measured % CHUNK_TOKENS == 0
    assert abs(near.measured - near.predicted) <= CHUNK_TOKENS
    assert far.high is None, "so much slower, L2 pays at no length tried"
    assert near.holds
    assert far.holds
    assert calibrate._good(ask, measured)
    late = dataclasses.replace(near, measured=near.high + CHUNK_TOKENS)
    early = dataclasses.replace(near, measured=near.low - CHUNK_TOKENS)
    never = dataclasses.replace(near, measured=None)
    assert [cross.holds for cross in (late, early, never)] == [False, False, False]
    assert dataclasses.replace(far, measured=None).holds
    nobody_looked_so_far = dataclasses.replace(never, longest=near.low)
    assert nobody_looked_so_far.holds
    rows = calibrate._break_even_table(ask, measured).rows
    assert [row["verdict"] for row in rows] == ["met", "met"]
