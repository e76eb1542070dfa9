"""Workloads: traces are checked line by line, and what the ladder needs of a workload is there for every seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.sim.workload import Workload, generate_trace, load_workload, read_trace, workload_from_trace

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]}


def write_trace(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_good_trace_is_read(tmp_path: Path) -> None:
    rows = read_trace(write_trace(tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 5, "extra": "ignored"}))
    assert [row.timestamp_ms for row in rows] == [0, 5]
    assert rows[0].hash_ids == (0, 1)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "JSON|nested"),
        ("[1]", "not an object"),
        ({key: value for key, value in GOOD.items() if key != "hash_ids"}, "hash_ids is missing"),
        ({**GOOD, "timestamp": -1}, "timestamp is -1"),
        ({**GOOD, "timestamp": True}, "timestamp is True"),
        ({**GOOD, "input_length": 0}, "input_length is 0"),
        ({**GOOD, "input_length": 10**12}, "input_length is 1000000000000"),
        ({**GOOD, "output_length": 1.5}, "output_length is 1.5"),
        ({**GOOD, "hash_ids": [0, "1"]}, "hash_ids is not a list of integers"),
        ({**GOOD, "hash_ids": [0]}, "1 hash_ids for 1000 tokens, expected 2"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, row: Any, problem: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", GOOD, GOOD, row)
    with pytest.raises(ConfigError, match=rf"line 3: .*({problem})"):
        read_trace(path)


def test_an_empty_or_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write_trace(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "binary.jsonl")


def shared_chunks_beyond_the_first(workload: Workload, family: tuple[str, ...]) -> int:
    """The longest prefix in whole chunks that two members of a family have in common."""
    size = workload.chunk_tokens
    prompts = [request.prompt for request in workload.requests if request.request_id in family]
    best = 0
    for position, one in enumerate(prompts):
        for other in prompts[position + 1 :]:
            common = 0
            while common < min(len(one), len(other)) and one[common] == other[common]:
                common += 1
            best = max(best, common // size)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_a_workload_has_what_the_ladder_needs(seed: int) -> None:
    workload = workload_from_trace(generate_trace(seed), seed)
    lengths = [len(request.prompt) for request in workload.requests]
    assert len(workload.requests) == 120
    assert len({request.request_id for request in workload.requests}) == 120
    assert workload.shared_families >= 20
    assert min(lengths) == 8
    assert max(lengths) == 640
    for remainder in (0, 1, 15):
        assert sum(length % 16 == remainder for length in lengths) >= 3, f"n = {remainder} modulo the chunk is too rare"
    outputs = [request.output_tokens for request in workload.requests]
    assert min(outputs) >= 2
    assert max(outputs) == 24
    assert all(0 <= token < 1 << 30 for request in workload.requests for token in request.prompt)
    times = [request.time_ns for request in workload.requests]
    assert times == sorted(times)
    shared = [shared_chunks_beyond_the_first(workload, family) for family in workload.families]
    assert sum(chunks >= 2 for chunks in shared) >= 18


def test_families_share_nothing_beyond_the_common_first_block() -> None:
    workload = workload_from_trace(generate_trace(3), 3)
    second = {
        family: {r.prompt[16:32] for r in workload.requests if r.request_id in family and len(r.prompt) >= 32}
        for family in workload.families
    }
    everything = [chunk for chunks in second.values() for chunk in chunks]
    assert len(everything) == len(set(everything))
    assert len({request.prompt[:16] for request in workload.requests if len(request.prompt) >= 16}) == 1


def test_the_same_seed_gives_the_same_workload_and_another_one_another() -> None:
    rows = generate_trace(1)
    assert workload_from_trace(rows, 1) == workload_from_trace(rows, 1)
    assert workload_from_trace(rows, 1) != workload_from_trace(rows, 2)


def test_a_workload_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    rows = [
        {
            "timestamp": r.timestamp_ms,
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
            "hash_ids": r.hash_ids,
        }
        for r in generate_trace(4)
    ]
    write_trace(path, *rows)
    assert load_workload(path, 1).source == "trace small.jsonl"
    assert load_workload(tmp_path / "absent", 1).source == "generated trace, seed 1"
    assert load_workload(None, 1).requests == load_workload(tmp_path / "absent", 1).requests
    assert load_workload(path, 1).describe().startswith("120 requests in ")


def test_a_trace_without_sharing_is_refused() -> None:
    rows = [row for row in generate_trace(1) if row.hash_ids[1] < 40]
    with pytest.raises(ConfigError, match="families"):
        workload_from_trace(rows, 1)


def test_more_families_than_requests_can_fill_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot fill"):
        workload_from_trace(generate_trace(1), 1, requests=30, families=20)
