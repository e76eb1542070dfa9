"""From a URL to an adapter.

    memory:                                   in this process, gone with it
    memory:?capacity=1GiB
    file:///var/cache/kv?capacity=200GiB      a directory of this process alone
    file:///var/cache/kv?fsync=true&name=ssd

Options: `capacity` (bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB, TiB; envelopes count), `name` (in metrics
and messages; unique among the adapters of a cache), `fsync` (files only). What is not understood is refused with the
nearest thing that is, before anything is touched. Error texts never repeat the URL: it may hold a password.

The adapter belongs to the caller, who closes it before the executor.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvcore.config.values import parse_size
from kvcore.errors import ConfigError
from kvcore.l2.file import file_adapter
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.memory import memory_adapter
from kvcore.ports import Clock, Executor, Notice
from kvcore.quota import Quota
from kvcore.runtime.files import OsFiles

_OPTIONS = {"memory": ("capacity", "name"), "file": ("capacity", "fsync", "name")}
_YES_NO = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def open_adapter(
    url: str,
    *,
    executor: Executor,
    notice_factory: Callable[[], Notice],
    clock: Clock,
    quota: Quota | None = None,
) -> IndexedAdapter:
    """The adapter that `url` names, opened. ConfigError: one line that says what is wrong with it. Blocking."""
    parts, options = _understood(url)
    name = options.get("name", parts.scheme)
    capacity = parse_size(options["capacity"]) if "capacity" in options else None
    if parts.scheme == "memory":
        _check_memory(parts)
        return memory_adapter(
            name, executor=executor, notice_factory=notice_factory, capacity_bytes=capacity, quota=quota
        )
    files = OsFiles(_path(parts), fsync=_parse_flag("fsync", options.get("fsync", "false")))
    return file_adapter(
        name,
        files,
        executor=executor,
        notice_factory=notice_factory,
        clock=clock,
        capacity_bytes=capacity,
        quota=quota,
    )


def check_url(url: str) -> None:
    """Raise `ConfigError` for a URL that can never work. Opens nothing."""
    parts, options = _understood(url)
    if "capacity" in options:
        parse_size(options["capacity"])
    if parts.scheme == "memory":
        _check_memory(parts)
    else:
        _path(parts)
        _parse_flag("fsync", options.get("fsync", "false"))


def _understood(url: str) -> tuple[SplitResult, dict[str, str]]:
    parts = urlsplit(url)
    if not parts.scheme:
        raise ConfigError("an L2 store is named by a URL with a scheme: file:///var/cache/kv for a directory, memory:")
    _check_known("L2 scheme", parts.scheme, _OPTIONS)
    return parts, _options(parts)


def _options(parts: SplitResult) -> dict[str, str]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options: dict[str, str] = {}
    for option, value in pairs:
        _check_known(f"option of a {parts.scheme} store", option, _OPTIONS[parts.scheme])
        if option in options:
            raise ConfigError(f"the option {option} is given twice")
        if not value:
            raise ConfigError(f"the option {option} has no value")
        options[option] = value
    return options


def _check_memory(parts: SplitResult) -> None:
    if parts.netloc or parts.path or parts.fragment:
        raise ConfigError("a memory store has no host and no path; write memory: or memory:?capacity=1GiB")


def _path(parts: SplitResult) -> str:
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.fragment:
        raise ConfigError("a file store is named by an absolute path with three slashes: file:///var/cache/kv")
    path = unquote(parts.path)
    if path.strip("/") == "" or "\0" in path:
        raise ConfigError("a file store needs a directory of its own: file:///var/cache/kv")
    return path


def _parse_flag(option: str, text: str) -> bool:
    _check_known(f"value of {option}", text.lower(), _YES_NO)
    return _YES_NO[text.lower()]


def _check_known(what: str, given: str, known: Iterable[str]) -> None:
    """Refuse `given` and name the nearest known one."""
    names = [name for name in known if name]
    if given in known:
        return
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {given[:40]!r}; the nearest one is {near[0]!r}, known are {', '.join(names)}")
