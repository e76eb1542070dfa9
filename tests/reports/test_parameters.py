"""The tables, and a user's file over them. Everything wrong is refused by entry and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from kvcore.reports import parameters
from kvcore.reports.parameters import builtin, read

# Published bytes per token in bf16 and bytes that do not grow: models' cards and configurations, by hand.
KNOWN_BYTES = {
    "Llama-3.1-8B": (131_072, 0), "Llama-3.1-70B": (327_680, 0), "Llama-3.1-405B": (516_096, 0),
    "Qwen3-8B": (147_456, 0), "Qwen3-32B": (262_144, 0), "Qwen3-30B-A3B": (98_304, 0),
    "Qwen3-235B-A22B": (192_512, 0), "Mixtral-8x7B": (131_072, 0), "DeepSeek-V3": (70_272, 0),
    "gpt-oss-120b": (36_864, 4_718_592), "gpt-oss-20b": (24_576, 3_145_728), "Gemma-3-27B": (81_920, 436_207_616),
    "Qwen3.5-397B-A17B": (30_720, 192_000_000), "Nemotron-3-Nano-30B-A3B": (6_144, 48_000_000),
}  # fmt: skip
MINE = {
    "name": "mine", "layers_full": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "hidden_dim": 256,
    "params_active": 9e8, "params_total": 1e9, "weight_bytes": 2e9,
}  # fmt: skip


def write(folder: Path, tree: object, name: str = "mine.json") -> Path:
    file = folder / name
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return file


def test_bytes_per_token_follow_from_the_shapes() -> None:
    models = builtin().models
    assert {name: (one.kv_bytes_per_token(), one.constant_bytes()) for name, one in models.items()} == KNOWN_BYTES


def test_every_entry_names_its_source_and_only_real_fields_as_unsure() -> None:
    known = builtin()
    for entry in (*known.models.values(), *known.hosts.values(), *known.tiers.values()):
        assert entry.source, entry
        assert all(hasattr(entry, field) for field in entry.unsure), entry


def test_eight_hosts_and_the_tiers_are_there() -> None:
    known = builtin()
    assert [host.partition("-")[0] for host in known.hosts] == [
        "A10", "L40S", "A100", "H100", "H200", "GH200", "B200", "MI300X",
    ]  # fmt: skip
    assert {"host DRAM over PCIe5", "100G RDMA", "local NVMe gen4", "S3"} <= set(known.tiers)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "deepseek-v3", "DeepSeek-V3 (MLA)", " deepseek-v3 "])
def test_case_and_remarks_do_not_matter(name: str) -> None:
    assert builtin().model(name).name == "DeepSeek-V3"


def test_a_name_may_be_cut_at_a_hyphen_where_one_entry_is_left() -> None:
    assert builtin().host("H100").gpu == "H100-SXM"
    with pytest.raises(ConfigError, match=r"unknown model 'Llama-3\.1'"):
        builtin().model("Llama-3.1")
    with pytest.raises(ConfigError, match="unknown host 'H1'"):
        builtin().host("H1")


@pytest.mark.parametrize(
    ("kind", "name", "nearest"),
    [
        ("model", "Lama-3.1-8B", "'Llama-3.1-8B'"),
        ("model", "qwen3-33b", "'Qwen3-32B'"),
        ("host", "H10O-SXM", "'H100-SXM'"),
        ("tier", "100G RDMAs", "'100G RDMA'"),
    ],
)
def test_the_nearest_names_of_an_unknown_one_are_suggested(kind: str, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown {kind} {name!r}: did you mean {nearest}"):
        getattr(builtin(), kind)(name)


@pytest.mark.parametrize("name", ["", "zzzzz", "(MLA)"])
def test_where_nothing_is_near_all_are_listed(name: str) -> None:
    with pytest.raises(ConfigError, match="known are A10, L40S"):
        builtin().host(name)


def test_without_a_file_the_tables_are_what_there_is() -> None:
    assert read(None) == builtin()


def test_a_users_entries_are_added_and_replace_ours_as_a_whole(tmp_path: Path) -> None:
    known = read(write(tmp_path, {"models": [MINE, {**MINE, "name": "llama-3.1-8b"}]}))
    assert known.model("mine").layers == 2
    assert known.model("Llama-3.1-8B").layers == 2
    assert len(known.models) == len(builtin().models) + 1
    assert known.hosts == builtin().hosts


def test_toml_is_read_as_well(tmp_path: Path) -> None:
    tier = '[[tiers]]\nname = "my disk"\nt0_s = 0.001\nbytes_per_s = 2e9\n'
    text = tier + '[[hosts]]\ngpu = "X"\nflops = 1e14\nhbm_Bps = 1e12\nhbm_bytes = 8e10\nlink_Bps = 2e10\n'
    known = read(write(tmp_path, text, "mine.toml"))
    assert known.tier("my disk").bytes_per_s == 2e9
    assert known.host("x").efficiency_linear == 0.66


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ([], "must hold an object"),
        ({"model": [MINE]}, "unknown section 'model': did you mean 'models'"),
        ({"models": MINE}, "models must be a list"),
        ({"models": [7]}, r"models\[0\] must be an object"),
        ({"models": [{**MINE, "kv_head": 2}]}, r"\[0\] \(mine\): unknown field 'kv_head': did you mean 'kv_heads'"),
        ({"models": [{key: MINE[key] for key in MINE if key != "heads"}]}, "missing required field `heads`"),
        ({"models": [{key: MINE[key] for key in MINE if key != "name"}]}, r"\(without a name\): .*missing required"),
        ({"models": [{**MINE, "heads": "4"}]}, r"Expected `int`, got `str` - at `\$.heads`"),
        ({"models": [{**MINE, "heads": 0}]}, "heads must be from 1"),
        ({"models": [{**MINE, "heads": -4}]}, "heads must be from 1"),
        ({"models": [{**MINE, "params_active": 1e300}]}, "params_active must be above 0 and at most"),
        ('{"models": [{"name": "x", "weight_bytes": NaN}]}', "models"),
        ({"models": [MINE, {**MINE, "name": "MINE"}]}, "'MINE' is there twice"),
        ({"hosts": [{"gpu": "X", "flops": 989, "hbm_Bps": 1e12, "hbm_bytes": 8e10, "link_Bps": 2e10}]}, "in TFLOP/s"),
        ({"tiers": [{"name": "t", "t0_s": -1, "bytes_per_s": 1e9}]}, r"tiers\[0\] \(t\): t0_s must be from 0"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_entry_and_field(tree: object, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, tree)
    with pytest.raises(ConfigError, match=message) as refusal:
        read(file)
    assert str(file) in str(refusal.value)


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"models": [{**MINE, "weight_bytes": float("nan")}]})
    with pytest.raises(ConfigError, match="weight_bytes must be above 0"):
        read(write(tmp_path, text))


def test_a_number_with_thousands_of_digits_is_refused_in_words(tmp_path: Path) -> None:
    text = json.dumps({"models": [MINE]}).replace('"layers_full": 2', '"layers_full": ' + "9" * 5_000)
    with pytest.raises(ConfigError, match="mine"):
        read(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the parameters"):
        read(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot read the parameters"):
        read(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        read(tmp_path / "binary.json")


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "FILE_BYTES_MAX", 1)
    with pytest.raises(ConfigError, match="is larger than"):
        read(write(tmp_path, {"models": []}))
