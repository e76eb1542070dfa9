"""Traces: each format by hand-made files, what is refused and how, and the public files where they are."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.reports import traces
from kvcore.reports.traces.trace import Chunker, Request, Trace, checked, quantum_s, spread


def row(timestamp: float, tokens: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


def mooncake(path: Path, rows: list[dict[str, Any]]) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        traces.read(path, **options)
    return str(caught.value)


# --- Mooncake ------------------------------------------------------------------------------------------------------


def test_a_line_of_mooncakes_format_is_one_request(tmp_path: Path) -> None:
    trace = traces.read(mooncake(tmp_path, [row(0, 1024, [0, 1]), row(250, 513, [0, 7])]))
    assert trace.block_tokens == 512
    assert trace.requests == (Request(0.0, 1024, 5, (0, 1)), Request(0.25, 513, 5, (0, 7)))
    assert (trace.input_tokens, trace.output_tokens, trace.duration_s) == (1537, 10, 0.25)


def test_the_block_size_is_the_one_that_all_lines_agree_with(tmp_path: Path) -> None:
    assert traces.read(mooncake(tmp_path, [row(0, 40, [0, 1, 2]), row(1, 16, [0])])).block_tokens == 16


def test_the_limit_takes_the_first_requests(tmp_path: Path) -> None:
    file = mooncake(tmp_path, [row(time, 512, [time]) for time in range(5)])
    assert [request.blocks for request in traces.read(file, limit=2).requests] == [(0,), (1,)]
    assert "limit of 0" in refused(file, limit=0)


def test_a_gzip_file_is_read_as_well(tmp_path: Path) -> None:
    plain = mooncake(tmp_path, [row(0, 512, [3])])
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert traces.read(packed).requests == traces.read(plain).requests
    packed.write_bytes(packed.read_bytes()[:-12])
    assert "cannot read the trace" in refused(packed)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(0, 1024, [0, 1]), row(1, 1024, [0])], "two block sizes"),
        ([row(0, 1024, [0, 1])] * 3 + [row(1, 1024, list(range(64)))], "two block sizes in one trace"),
        ([row(5, 512, [0]), row(4, 512, [1])], "sort the file by time"),
        ([row(-1, 512, [0])], "arrives at"),
        ([row(1e15, 512, [0])], "arrives at"),
        ([row(0, 512, [0], output=-1)], "-1 output tokens"),
        ([row(0, 0, [])], "0 input tokens"),
        ([row(0, -5, [])], "-5 input tokens"),
        ([row(0, 512, [0], output=10**12)], "output tokens"),
        ([row(0, 512, [0]), row(1, -5, [1])], "line 2 has -5 input tokens: from 1 to"),
        ([row(0, 512, [0]), row(1, 10**25, [1])], "input tokens: from 1 to"),
        ([row(0, 512, [0]), row(1, 512, [-1])], "has the block id -1"),
        ([row(0, 512, [2**64])], "has the block id 18446744073709551616"),
        ([row(0, 512, [10**400])], f"has the block id 1{39 * '0'}...: ids are from 0"),
        ([], "no requests"),
    ],
)
def test_what_cannot_be_replayed_is_refused(rows: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    message = refused(mooncake(tmp_path, rows))
    assert words in message


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"timestamp": 0}', '{"timestamp": "now"}', "\xff"])
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    file = mooncake(tmp_path, [row(0, 512, [0])])
    file.write_text(file.read_text() + line + "\n" + json.dumps(row(1, 512, [1])), encoding="latin-1")
    assert "line 2" in refused(file)


def test_a_hole_says_which_line(tmp_path: Path) -> None:
    file = mooncake(tmp_path, [row(0, 1024, [0, 1]), row(1, 2048, [0, 1, 2]), row(2, 512, [0])])
    assert "line 2 has 3 hash_ids for 2,048 input tokens" in refused(file)


def test_a_compressed_line_without_end_is_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may be larger than any memory when it is unpacked."""
    monkeypatch.setattr(traces, "LINE_BYTES_MAX", 1 << 20)
    file = tmp_path / "zeros.jsonl.gz"
    file.write_bytes(gzip.compress(bytes(3 << 20)))
    assert "line 1 is longer than 1 MiB" in refused(file)


def test_what_is_no_file_is_called_by_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is no file but a folder" in refused(tmp_path)
    assert "is no file but a device or a pipe" in refused(tmp_path / "pipe")
    assert "there is no file" in refused(tmp_path / ("x" * 5000))


# --- names ---------------------------------------------------------------------------------------------------------


def test_a_known_name_is_looked_for_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mooncake(tmp_path, [row(0, 512, [0])]).rename(tmp_path / "conversation_trace.jsonl")
    monkeypatch.setenv("KVCORE_TRACES", str(tmp_path))
    assert len(traces.read("conversation")) == 1
    assert "set KVCORE_TRACES" in refused(Path("synthetic"))


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    assert "'conversation'" in refused(Path("conversaton"))
    assert "known are" in refused(Path("zzz"))


# --- quantised times -----------------------------------------------------------------------------------------------


def test_times_in_bins_are_spread_over_the_bin_and_the_notes_say_so(tmp_path: Path) -> None:
    file = mooncake(tmp_path, [row(3000 * (n // 10), 512, [n]) for n in range(200)])
    spread_out = traces.read(file, seed=3)
    times = [request.arrival_s for request in spread_out.requests]
    assert len(set(times)) == 200
    assert times == sorted(times)
    assert all(n // 10 * 3 <= time < n // 10 * 3 + 3 for n, time in enumerate(times))
    assert "rounded to 3 s" in spread_out.notes[-1]
    raw = traces.read(file, raw_timestamps=True)
    assert {request.arrival_s for request in raw.requests} == {3.0 * n for n in range(20)}
    assert "burst" in raw.notes[-1]


def test_the_seed_of_the_spreading_decides(tmp_path: Path) -> None:
    file = mooncake(tmp_path, [row(3000 * (n // 10), 512, [n]) for n in range(60)])
    assert traces.read(file, seed=1) == traces.read(file, seed=1)
    assert traces.read(file, seed=1).requests != traces.read(file, seed=2).requests


def test_times_of_their_own_are_left_alone() -> None:
    assert quantum_s([0.0, 1.0, 1.5, 4.0]) == 0.0
    assert quantum_s([0.0] * 4 + [3.0] * 4 + [6.0] * 4) == 3.0
    assert quantum_s([1.0] * 50) == 0.0


def test_a_width_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="spread over"):
        spread(Trace("t", 512, (Request(0.0, 1, 1, (0,)),)), float("nan"))


# --- Azure ---------------------------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def azure(path: Path, lines: str) -> Path:
    file = path / "azure.csv"
    file.write_text(lines)
    return file


def test_azures_lines_are_arrivals_without_prefixes(tmp_path: Path) -> None:
    text = AZURE + "2023-12-31 23:59:59.5,1000,44\n2024-01-01 00:00:01.25,1000,3\n"
    trace = traces.read(azure(tmp_path, text))
    assert [request.arrival_s for request in trace.requests] == [0.0, pytest.approx(1.75)]
    assert set(trace.requests[0].blocks).isdisjoint(trace.requests[1].blocks)
    assert "nothing about shared prefixes" in trace.notes[0]


def test_the_leap_day_counts(tmp_path: Path) -> None:
    text = AZURE + "2024-02-28 00:00:00,1,1\n2024-03-01 00:00:00,1,1\n"
    assert traces.read(azure(tmp_path, text)).duration_s == 2 * 86_400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n", "no Azure trace"),
        (AZURE + "yesterday,1,1\n", "line 2"),
        (AZURE + "2024-01-01 00:00:00,-1,1\n", "line 2 has -1 input tokens"),
        (AZURE + "2024-01-01 00:00:00,1,99999999999\n", "output tokens: from 0 to"),
        (AZURE + f"2024-01-01 00:00:00,1{5000 * '0'},1\n", "line 2 is no request"),
        (AZURE + "2024-13-01 00:00:00,1,1\n", "line 2 is no request"),
        (AZURE + "2024-01-01 24:00:00,1,1\n", "line 2 is no request"),
        (AZURE + "2024-01-01 00:00:09,1,1\n2024-01-01 00:00:00,1,1\n", "sort the file by time"),
    ],
)
def test_a_broken_azure_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    assert words in refused(azure(tmp_path, text))


# --- Weka ----------------------------------------------------------------------------------------------------------


def ask(t: float, tokens: int, keep: int, add: list[list[int]]) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 2, "keep": keep, "add": add}


def weka(path: Path, sessions: list[list[dict[str, Any]]], size: int = 64) -> Path:
    file = path / "weka.jsonl"
    file.write_text("".join(json.dumps({"block_size": size, "requests": one}) + "\n" for one in sessions))
    return file


def test_a_delta_is_rebuilt_and_blocks_are_joined_to_chunks(tmp_path: Path) -> None:
    session = [ask(0, 1024, 0, [[100, 16]]), ask(9, 1600, 12, [[200, 8], [300, 5]])]
    first, second = traces.read(weka(tmp_path, [session])).requests
    assert len(first.blocks) == 2
    assert len(second.blocks) == 4, "25 blocks of 64 are 3 chunks of 512 and a rest"
    assert first.blocks[0] == second.blocks[0], "blocks 0 to 7 are the same"
    assert first.blocks[1] != second.blocks[1], "the twelve kept blocks end in the middle of the second chunk"
    assert second.arrival_s == pytest.approx(first.arrival_s + 9)


def test_equal_ids_of_two_sessions_are_not_equal(tmp_path: Path) -> None:
    one, other = traces.read(weka(tmp_path, [[ask(0, 512, 0, [[0, 8]])]] * 2)).requests
    assert set(one.blocks).isdisjoint(other.blocks)


def test_a_subagent_counts_from_its_own_beginning_and_may_share(tmp_path: Path) -> None:
    inner = {"t": 5.0, "type": "subagent", "requests": [ask(1, 512, 0, [[0, 8]])]}
    main, agent = traces.read(weka(tmp_path, [[ask(0, 512, 0, [[0, 8]]), inner]])).requests
    assert agent.arrival_s == pytest.approx(main.arrival_s + 6)
    assert agent.blocks == main.blocks


def test_a_prompt_may_name_its_whole_blocks_only(tmp_path: Path) -> None:
    one, other = traces.read(weka(tmp_path, [[ask(0, 520, 0, [[0, 8]]), ask(1, 530, 8, [])]])).requests
    assert (len(one.blocks), len(other.blocks)) == (2, 2)
    assert one.blocks[0] == other.blocks[0]
    assert one.blocks[1] != other.blocks[1], "nobody said that the rests are equal"


@pytest.mark.parametrize(
    ("session", "size", "words"),
    [
        ([ask(0, 512, 3, [[0, 5]])], 64, "keeps 3 blocks of a request that has 0"),
        ([ask(0, 512, 0, [[0, 20]])], 64, "hole"),
        ([ask(0, 512, 0, [[0, 2]])], 64, "hole"),
        ([ask(0, 512, 0, [[-1, 8]])], 64, "run that cannot be"),
        ([ask(0, 512, 0, [[0, 10**12]])], 64, "run that cannot be"),
        ([ask(0, 512, 0, [[0, 6_250_000]] * 1000)], 64, "6,250,000,000 blocks of 64: the trace has a hole"),
        ([ask(0, 512, 0, [[10**400, 8]])], 64, "run that cannot be"),
        ([ask(0, 512, 10**400, [])], 64, "000... blocks of a request that has 0"),
        ([ask(-1, 512, 0, [[0, 8]])], 64, "at -1 s"),
        ([ask(0, 0, 0, [])], 64, "0 input tokens"),
        ([ask(0, -5, 0, [[0, 2]])], 64, "-5 input tokens: from 1 to"),
        ([ask(0, 512, 0, [[0, 8]])], 48, "mixed block sizes"),
    ],
)
def test_a_broken_session_is_refused(session: list[dict[str, Any]], size: int, words: str, tmp_path: Path) -> None:
    assert words in refused(weka(tmp_path, [session], size))


def test_subagents_without_end_are_no_session(tmp_path: Path) -> None:
    file = weka(tmp_path, [])
    opened = '{"t": 0, "type": "subagent", "requests": ['
    file.write_text('{"block_size": 64, "requests": [' + 3000 * opened + 3000 * "]}" + "]}\n")
    assert "line 1 is no session in Weka's format" in refused(file)


def test_sessions_overlap_in_time_and_come_out_in_order(tmp_path: Path) -> None:
    session = [ask(0, 512, 0, [[0, 8]]), ask(500, 512, 8, [])]
    times = [request.arrival_s for request in traces.read(weka(tmp_path, [session] * 20)).requests]
    assert times == sorted(times)
    assert times[1] < 500, "the second session began before the first one ended"


def test_a_limit_reads_no_more_sessions_than_it_needs(tmp_path: Path) -> None:
    file = weka(tmp_path, [[ask(0, 512, 0, [[0, 8]])]] * 5)
    everything = traces.read(file)
    file.write_text(file.read_text() + "broken\n")
    assert traces.read(file, limit=3).requests == everything.requests[:3]


# --- generator, chunks, checks -------------------------------------------------------------------------------------


def test_the_generated_trace_has_the_shape_it_claims() -> None:
    trace = traces.read("generated", limit=6000)
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        whole = request.blocks[: request.input_tokens // 512]
        for block in whole:
            if block not in seen:
                break
            hits += 512
        seen.update(whole)
    assert checked(trace) is trace
    assert trace.input_tokens / len(trace) == pytest.approx(12_000, rel=0.12)
    assert trace.output_tokens / len(trace) == pytest.approx(343, rel=0.05)
    assert hits / trace.input_tokens == pytest.approx(0.37, abs=0.05)
    assert len(trace) / trace.duration_s == pytest.approx(3.4, rel=0.06)


def test_the_generators_seed_decides() -> None:
    assert traces.read("generated:7", limit=50) == traces.read("generated", limit=50, seed=7)
    assert traces.read("generated:7", limit=50).requests != traces.read("generated:8", limit=50).requests
    assert "no whole number" in refused(Path("generated:x"))
    for wrong in (0, -1):
        with pytest.raises(ConfigError):
            traces.generate(wrong)
    with pytest.raises(ConfigError, match="requests per second"):
        traces.generate(5, rate_per_s=float("inf"))


def test_chunks_are_equal_as_far_as_everything_before_them_is() -> None:
    chunker = Chunker(2)
    one = chunker.chunks([1, 2, 3, 4, 5])
    assert chunker.chunks([1, 2, 3, 4, 5]) == one
    assert chunker.chunks([1, 2, 9, 4, 5])[0] == one[0]
    assert chunker.chunks([1, 2, 9, 4, 5])[2] != one[2], "its beginning differs"
    assert chunker.chunks([1, 2, 3, 4, 6], known=one[:2])[:2] == one[:2]


@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [
        ("conversation_trace.jsonl", 12_031, 144_793_823),
        ("synthetic_trace.jsonl", 3_993, 61_194_628),
        ("AzureLLMInferenceTrace_conv.csv", 19_366, None),
        ("AzureLLMInferenceTrace_code.csv", 8_819, None),
    ],
)
def test_the_public_traces_are_read_whole(
    name: str, requests: int, tokens: int | None, trace_file: Callable[[str], Path]
) -> None:
    trace = traces.read(trace_file(name))
    assert len(trace) == requests
    assert tokens is None or trace.input_tokens == tokens


def test_wekas_trace_shares_most_of_its_tokens(trace_file: Callable[[str], Path]) -> None:
    trace = traces.read(trace_file("weka_agentic_code_delta.jsonl.gz"), limit=300)
    assert len(trace) == 300
    references = sum(len(request.blocks) for request in trace.requests)
    assert references > 5 * len({block for request in trace.requests for block in request.blocks})
