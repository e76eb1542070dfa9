"""Values as people write them: sizes, durations, yes and no, lists; and secrets that must not be printed.

The unit is in the name of a field, so the name says how a text is read: `*_bytes` takes `8GiB`, `*_ns` takes `250ms`.
Sizes and durations are exact whole numbers; "1.5GiB" is refused, because two readers would round it differently.
"""

from __future__ import annotations

import difflib
import re
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from kvcore.errors import ConfigError

_SIZE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TIME_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_YES_NO = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
_NUMBER = re.compile(r"(\d+)\s*([a-zA-Z]*)", re.ASCII)
_SECRET = re.compile(r"pass|secret|token|key|credential|signature", re.IGNORECASE)
HIDDEN = "***"


def parse_size(text: str) -> int:
    """Bytes: `4096`, `512MiB`, `8GiB`."""
    return _number(text, _SIZE_UNITS, "a size", "a whole number and a unit, such as 512MiB or 8GiB")


def parse_duration_ns(text: str) -> int:
    """Nanoseconds: `250ms`, `30s`, `5min`. A unit is needed: nobody knows what a bare 30 means."""
    return _number(text, _TIME_UNITS, "a duration", "a whole number and a unit, such as 250ms, 30s or 5min")


def parse_flag(text: str) -> bool:
    try:
        return _YES_NO[text.strip().lower()]
    except KeyError:
        raise ConfigError(f"{text!r} is neither yes nor no; write true or false") from None


def parse_whole(text: str) -> int:
    try:
        return int(text.strip(), 10)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


def parse_list(text: str) -> tuple[str, ...]:
    """Comma-separated; a comma inside an entry has to be written %2C."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def redact_url(url: str) -> str:
    """The URL without its password and without query values that look like secrets. Other text is left as it is."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return HIDDEN  # nobody can say where a secret would be in it
    if not parts.scheme:
        return url
    host = parts.netloc.rpartition("@")[2]
    user = f"{quote(parts.username or '')}{':' + HIDDEN if password else ''}@" if "@" in parts.netloc else ""
    query = [(name, HIDDEN if _SECRET.search(name) else value) for name, value in parse_qsl(parts.query)]
    shown = urlencode(query, safe="*/:") if any(value == HIDDEN for _, value in query) else parts.query
    text = urlunsplit((parts.scheme, user + host, parts.path, shown, parts.fragment))
    head = f"{parts.scheme}:"
    if url.startswith(f"{head}//") and not text.startswith(f"{head}//"):
        text = f"{head}//{text.removeprefix(head)}"  # urlunsplit drops the slashes of schemes that it does not know
    return text


def _number(text: str, units: dict[str, int], what: str, how: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not {what}; write {how}")
    unit = match[2].lower()
    if unit not in units:
        known = [name for name in units if name]
        near = f"the nearest one is {difflib.get_close_matches(unit, known, 1, 0.0)[0]!r}, " if unit else ""
        raise ConfigError(f"{text!r} has no known unit of {what.split()[-1]}; {near}known are {', '.join(known)}")
    return int(match[1]) * units[unit]
