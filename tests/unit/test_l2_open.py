"""From URL to adapter: what is understood works, anything else is refused by name and touches nothing."""

from __future__ import annotations

import pytest

from kvcore.config.values import parse_size
from kvcore.errors import ConfigError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.open import open_adapter
from kvcore.ports import Outcome

KEY = ObjectKey(b"k" * 32, "model", 0)


class InlineExecutor:
    def submit(self, work, deliver, cost_bytes=0):
        deliver(Outcome(work(), None))

    def close(self):
        pass


class SilentNotice:
    def signal(self):
        pass

    def subscribe(self, callback):
        pass

    def close(self):
        pass


class FixedClock:
    def now_ns(self):
        return 0

    def token(self, nbytes):
        return "ab" * nbytes


def opened(url):
    return open_adapter(url, executor=InlineExecutor(), notice_factory=SilentNotice, clock=FixedClock())


def round_trip(adapter):
    task = adapter.submit_store([KEY], [memoryview(b"payload")])
    assert adapter.pop_completed_stores() == {task: [StoreAnswer.STORED]}
    buffer = bytearray(7)
    assert adapter.take_load(adapter.submit_load([KEY], [memoryview(buffer)])) == 1
    return bytes(buffer)


@pytest.mark.parametrize(
    ("url", "capacity", "name"),
    [
        ("memory:", None, "memory"),
        ("memory:?capacity=1GiB", 2**30, "memory"),
        ("memory:?name=tier2&capacity=4096", 4096, "tier2"),
    ],
)
def test_a_memory_url_opens_a_memory_store(url, capacity, name):
    adapter = opened(url)
    assert adapter.usage().bytes_capacity == capacity
    assert adapter.name == name
    assert round_trip(adapter) == b"payload"


@pytest.mark.parametrize("options", ["", "?capacity=10GiB", "?capacity=10GiB&fsync=true&name=ssd"])
def test_a_file_url_opens_a_directory_and_finds_it_again(tmp_path, options):
    url = f"file://{tmp_path}/a%20store{options}"
    adapter = opened(url)
    assert round_trip(adapter) == b"payload"
    adapter.close()
    assert (tmp_path / "a store").is_dir()
    assert opened(url).keys() == [KEY]


@pytest.mark.parametrize(
    ("url", "nearest"),
    [
        ("flie:///x", "'file'"),
        ("memroy:", "'memory'"),
        ("/var/cache/kv", "file:///"),
        ("memory:?capactiy=1GiB", "'capacity'"),
        ("file:///x?fsnyc=true", "'fsync'"),
        ("file:///x?fsync=ture", "true or false"),
        ("memory:?capacity=1Gib2", "whole number"),
        ("memory:?capacity=10gob", "'gb'"),
    ],
)
def test_what_is_not_known_is_refused_with_the_nearest(url, nearest):
    with pytest.raises(ConfigError, match=nearest):
        opened(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory://host",
        "memory:/path",
        "file://",
        "file:///",
        "file://server/path",
        "file:relative",
        "file:///x%00y",
        "file:///x#part",
        "memory:?capacity=1&capacity=2",
        "memory:?capacity=",
        "memory:?capacity",
        "memory:?capacity=-1",
        "memory:?capacity=1.5GiB",
        "memory:?fsync=true",
    ],
)
def test_what_makes_no_sense_is_refused(url):
    with pytest.raises(ConfigError):
        opened(url)


def test_a_refused_url_touches_nothing(tmp_path):
    with pytest.raises(ConfigError):
        opened(f"file://{tmp_path}/store?capacity=lots")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_does_not_repeat_a_password():
    with pytest.raises(ConfigError) as caught:
        opened("redsi://user:secret@host/0")
    assert "secret" not in str(caught.value)


def test_two_adapters_on_one_directory_are_refused(tmp_path):
    first = opened(f"file://{tmp_path}/store")
    with pytest.raises(ConfigError, match="held by another process"):
        opened(f"file://{tmp_path}/store")
    first.close()
    opened(f"file://{tmp_path}/store").close()


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("10GiB", 10 << 30), ("10 gib", 10 << 30), ("3GB", 3 * 10**9)]
)
def test_sizes_are_exact(text, size):
    assert parse_size(text) == size
