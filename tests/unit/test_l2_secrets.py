"""A store's secrets are in no text: not in a repr, an error, a log line, or the printed configuration."""

from __future__ import annotations

import asyncio
import logging
import traceback

import pytest

from kvcore.config.values import redact_url
from kvcore.errors import KvcoreError
from kvcore.l2.late import LateAdapter
from kvcore.l2.open import parse_store
from kvcore.l2.open_schemes import SCHEMES
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice
from kvcore.service.serve_config import ServeConfig, load_serve_config

SECRET = "s3cr3t-Pa55"
# Nobody listens on port 1, and the paths are not directories: each of these can be understood and not opened.
URLS = [
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"rediss://user:{SECRET}@127.0.0.1:1/0",
    f"valkey://user:{SECRET}@127.0.0.1:1",
    f"valkeys://:{SECRET}@127.0.0.1:1",
    f"redis+unix://:{SECRET}@/dev/null/sock",
    f"redis://127.0.0.1:1?password={SECRET}",
    f"s3://id:{SECRET}@bucket/prefix?endpoint=http://127.0.0.1:1&region=r&timeout_s=1",
    f"s3://bucket/prefix?endpoint=http://127.0.0.1:1&region=r&access_key_id=id&secret_access_key={SECRET}&timeout_s=1",
    f"s3://bucket?endpoint=http://127.0.0.1:1&region=r&access_key_id=i&secret_access_key=x&session_token={SECRET}&timeout_s=1",
]
# What is refused: the secret stands where something else should.
REFUSED = [
    f"redsi://user:{SECRET}@host/0",
    f"redis://user:{SECRET}@host:port/0",
    f"redis://user:{SECRET}@[::1/0",
    f"redis://user:{SECRET}@host/notanumber",
    f"redis://user:{SECRET}@host/0?dp=1",
    f"redis://user:{SECRET}@host/0?ttl_s=soon",
    f"redis://user:{SECRET}@host/0?db=1&db=2",
    f"redis://user:{SECRET}@host:99999/0",
    f"s3://id:{SECRET}@/prefix",
    f"s3://id:{SECRET}@bucket?capacity=lots",
    f"mooncake://user:{SECRET}@master",
    f"file://user:{SECRET}@host/path",
    f"slab://user:{SECRET}@host/path?capacity=1GiB",
    f"memory://user:{SECRET}@host",
]


@pytest.mark.parametrize("url", URLS)
def test_an_understood_url_shows_no_secret(url) -> None:
    spec = parse_store(url)
    for text in (repr(spec), repr(spec.common), repr(spec.options), spec.shown, str(spec)):
        assert SECRET not in text


@pytest.mark.parametrize("url", REFUSED)
def test_a_refused_url_is_not_repeated_with_its_secret(url) -> None:
    with pytest.raises(KvcoreError) as caught:
        parse_store(url)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in redact_url(url)


@pytest.mark.parametrize("url", URLS)
def test_the_printed_configuration_shows_no_secret(url) -> None:
    loaded = load_serve_config({"l2": (url,)}, {})
    assert SECRET not in loaded.render()
    assert SECRET not in repr(loaded.value)
    with pytest.raises(KvcoreError) as caught:
        ServeConfig(l2=(url, url))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", URLS)
def test_a_store_that_cannot_be_opened_tells_no_secret_to_the_log_or_in_its_error(url, caplog) -> None:
    spec = parse_store(url)
    pytest.importorskip("redis" if "redis" in url or "valkey" in url else "obstore", exc_type=ImportError)

    async def open_late() -> None:
        loop = asyncio.get_running_loop()
        executor = ThreadExecutor(loop, 1)
        late = LateAdapter("late", spec.shown, executor, spec.open_backend, _never_built, lambda: EventfdNotice(loop))
        async with asyncio.timeout(60):  # a refused connection takes milliseconds
            await late.first_attempt()
        assert not late.there
        with pytest.raises(KvcoreError) as refused:
            late.submit_lookup_and_lock([])
        assert SECRET not in str(refused.value)
        late.close()
        executor.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(open_late())
        with pytest.raises((KvcoreError, OSError)) as caught:
            spec.open_backend()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert "does not answer" in caplog.text
    assert SECRET not in caplog.text


def _never_built(backend):
    raise AssertionError("it was opened")


def test_every_scheme_that_takes_a_password_is_among_the_tested_ones() -> None:
    tested = {url.partition(":")[0] for url in URLS}
    without = {"memory", "file", "slab", "fs", "mooncake", "nixl+posix", "nixl+ucx"}
    without |= {"objectstore+file", "objectstore+memory"}
    assert tested | without | {"gs", "az"} == set(SCHEMES), "gs and az take theirs from the environment alone"
