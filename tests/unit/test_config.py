"""Configuration: which source wins, how values are written, and what is said about mistakes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import sources, values
from kvcore.config.sources import Field, fields_of
from kvcore.errors import ConfigError
from kvcore.service.serve_config import ServeConfig, load_serve_config

TOML = """
chunk_tokens = 32
l2 = ["file:///var/cache/kv"]

[l1]
capacity_bytes = "2GiB"

[storage]
lease_ns = "5s"
retain = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvcore.toml"
    path.write_text(TOML)
    return path


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(file: Path) -> None:
    environ = {"KVCORE_CHUNK_TOKENS": "64", "KVCORE_STORAGE_LEASE_NS": "6s", "HOME": "/root"}
    loaded = load_serve_config({"chunk_tokens": 128}, environ, file)
    assert loaded.value.chunk_tokens == 128
    assert loaded.value.storage.lease_ns == 6_000_000_000
    assert loaded.value.l1.capacity_bytes == 2 << 30
    assert loaded.value.storage.retain is True
    assert loaded.value.shutdown_ns == ServeConfig().shutdown_ns
    assert loaded.origins == {
        "chunk_tokens": "flag",
        "storage.lease_ns": "KVCORE_STORAGE_LEASE_NS",
        "l2": str(file),
        "l1.capacity_bytes": str(file),
        "storage.retain": str(file),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chunk_token = 3", "unknown setting chunk_token; the nearest one is chunk_tokens"),
        ("[l1]\ncapacity = 3", "unknown setting l1.capacity; the nearest one is l1.capacity_bytes"),
        ("[l3]\npolicy = 'lru'", "the nearest one is l1.policy"),
        ("chunk_tokens = 'many'", "chunk_tokens: 'many' is not a whole number"),
        ("chunk_tokens = true", "chunk_tokens: True is no int"),
        ("l2 = 'file:///x'", "l2: 'file:///x' is no list of texts"),
        ("[l1]\ncapacity_bytes = '1.5GiB'", "l1.capacity_bytes: '1.5GiB' is not a size"),
        ("[storage]\nlease_ns = '30'", "storage.lease_ns: '30' has no known unit of duration"),
        ("[server]\nsegment = 'x'", "unknown setting server.segment"),
        ("chunk_tokens", "is not TOML"),
        ("chunk_tokens = 0", "chunk_tokens = 0 must be at least 1"),
        ("[l1]\npolicy = 'fifo'", "known are lru, s3fifo"),
        ("[curve]\nsecret_file = '/x'", "needed together"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_serve_config({}, {}, path)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("KVCORE_CHUNK_TOKEN", "3", "the nearest one is KVCORE_CHUNK_TOKENS"),
        ("KVCORE_STORAGE_RETAIN", "perhaps", "KVCORE_STORAGE_RETAIN: 'perhaps' is neither yes nor no"),
        ("KVCORE_CHUNK_TOKENS", "3.5", "'3.5' is not a whole number"),
    ],
)
def test_a_mistake_in_the_environment_is_named(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_serve_config({}, {variable: text})
    assert said in str(raised.value)


def test_a_service_of_our_name_beside_us_sets_nothing() -> None:
    """S30: what Kubernetes tells every pod of a service called kvcore-cache; a setting that looks alike is refused."""
    told = {
        "KVCORE_CACHE_SERVICE_HOST": "10.0.0.7",
        "KVCORE_CACHE_SERVICE_PORT": "5555",
        "KVCORE_CACHE_SERVICE_PORT_METRICS": "9400",
        "KVCORE_CACHE_PORT": "tcp://10.0.0.7:5555",
        "KVCORE_CACHE_PORT_5555_TCP": "tcp://10.0.0.7:5555",
        "KVCORE_CACHE_PORT_5555_TCP_PROTO": "tcp",
        "KVCORE_CACHE_PORT_5555_TCP_PORT": "5555",
        "KVCORE_CACHE_PORT_5555_TCP_ADDR": "10.0.0.7",
    }
    loaded = load_serve_config({}, {**told, "KVCORE_CHUNK_TOKENS": "64"})
    assert (loaded.value.chunk_tokens, loaded.origins) == (64, {"chunk_tokens": "KVCORE_CHUNK_TOKENS"})
    with pytest.raises(ConfigError, match="unknown setting KVCORE_HTTP_PORT"):
        load_serve_config({}, {"KVCORE_HTTP_PORT": "9400"})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_serve_config({}, {}, tmp_path / "none.toml")


def test_what_is_printed_reads_back_as_the_same_configuration(tmp_path: Path, file: Path) -> None:
    loaded = load_serve_config({"l1.tenant_bytes": 7}, {"KVCORE_LOG_FORMAT": "json"}, file)
    printed = tmp_path / "printed.toml"
    printed.write_text(loaded.render())
    assert load_serve_config({}, {}, printed).value == loaded.value


def test_what_is_printed_shows_no_secret() -> None:
    urls = ("redis://user:hunter2@host/0", "s3://bucket/p?secret_access_key=hunter2&region=eu")
    printed = load_serve_config({"l2": urls}, {}).render()
    assert "hunter2" not in printed
    assert "user:***@host" in printed
    assert "region=eu" in printed


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:1/2", "redis://:***@h:1/2"),
        ("redis://user@h", "redis://user@h"),
        ("file:///var/kv?capacity=1GiB", "file:///var/kv?capacity=1GiB"),
        ("plain text", "plain text"),
        ("http://[broken", "***"),
        ("s3://b?TOKEN=a&x=1", "s3://b?TOKEN=***&x=1"),
    ],
)
def test_secrets_of_urls_are_hidden_and_the_rest_is_kept(url: str, shown: str) -> None:
    assert values.redact_url(url) == shown


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("3b", 3),
        ("2kB", 2_000),
        ("2 MB", 2_000_000),
        ("1 GB", 1_000_000_000),
        ("1TB", 1_000_000_000_000),
        ("64KiB", 65_536),
        ("1MiB", 1_048_576),
        ("8gib", 8_589_934_592),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert values.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("7ns", 7),
        ("2us", 2_000),
        ("250ms", 250_000_000),
        ("30s", 30_000_000_000),
        ("5 min", 300_000_000_000),
        ("2h", 7_200_000_000_000),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert values.parse_duration_ns(text) == ns


def test_a_size_without_a_known_unit_is_refused_with_the_units_there_are() -> None:
    with pytest.raises(ConfigError) as raised:
        values.parse_size("3 GiBs")
    assert str(raised.value) == (
        "'3 GiBs' has no known unit of size; the nearest one is 'gib', known are b, kb, mb, gb, tb, kib, mib, gib, tib"
    )
    with pytest.raises(ConfigError) as raised:
        values.parse_duration_ns("30")
    assert str(raised.value) == "'30' has no known unit of duration; known are ns, us, ms, s, min, h"


def test_yes_and_no_have_several_words() -> None:
    assert all(values.parse_flag(text) is True for text in ("true", "Yes", "1", " on "))
    assert all(values.parse_flag(text) is False for text in ("false", "NO", "0", "off"))
    assert values.parse_list(" a, b ,, c") == ("a", "b", "c")
    assert values.parse_whole(" 010 ") == 10


def test_an_optional_value_can_be_none() -> None:
    field = next(item for item in fields_of(ServeConfig) if item.path == "l1.tenant_bytes")
    assert field.parse("none") is None
    assert field.parse("1KiB") == 1024
    assert load_serve_config({}, {"KVCORE_L1_TENANT_BYTES": "none"}).value.l1.tenant_bytes is None


def test_every_field_has_a_variable_of_its_own() -> None:
    fields: list[Field] = list(fields_of(ServeConfig))
    variables = [field.variable for field in fields]
    assert len(set(variables)) == len(variables) > 30
    assert not any(path.endswith("segment") for path in (field.path for field in fields))


def test_two_equal_stores_are_refused_without_showing_the_password() -> None:
    with pytest.raises(ConfigError) as raised:
        load_serve_config({"l2": ("redis://:pw@h", "redis://:pw@h")}, {})
    assert "pw" not in str(raised.value)


def test_the_default_socket_lies_in_a_directory_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert ServeConfig().address == "ipc:///run/user/7/kvcore/server.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in ServeConfig().address


def test_a_struct_given_by_code_is_checked_too() -> None:
    wrong: dict[str, Any] = {"chunk_tokens": "x"}
    with pytest.raises(ConfigError, match="the command line: chunk_tokens"):
        sources.load(ServeConfig, flags=wrong)
