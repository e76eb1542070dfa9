"""The options that every store's URL may have, and what they make: guards, codecs, faults, quota.

A store that is asked over a network is *guarded* unless its URL says otherwise: two seconds for a call, and a breaker
that opens after three failures for five seconds. A store on this machine is not.

Values only; nothing is opened here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from kvcore.config.values import parse_flag, parse_list, parse_size, parse_whole
from kvcore.errors import ConfigError
from kvcore.l2.breaker import BreakerOptions
from kvcore.l2.coded import Codec
from kvcore.l2.faults import FaultPlan
from kvcore.quota import Quota

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_DEADLINE_MS = 2_000
_BREAKER_FAILURES = 3
_BREAKER_OPEN_S = 5
_METHODS = ("zstd", "fp8")
_QUOTA = "quota."


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """What was written; None: nothing was, and the store's kind decides."""

    name: str = ""
    capacity_bytes: int | None = None
    quota: Quota | None = None
    deadline_ms: int | None = None
    breaker_failures: int | None = None
    breaker_open_s: int | None = None
    retries: int = 0
    compress: tuple[str, ...] = ()
    key_file: str = field(default="", repr=False)
    fault: tuple[str, ...] = ()
    fault_seed: int = 0
    unsafe_faults: bool = False

    @classmethod
    def names(cls) -> list[str]:
        return [one.name.removesuffix("_bytes") for one in fields(cls)]

    @staticmethod
    def is_quota(option: str) -> bool:
        return option.startswith(_QUOTA)

    def deadline_ns(self, guarded: bool) -> int:
        """0: calls have no deadline."""
        default_ms = _DEADLINE_MS if guarded else 0
        return _NS_PER_MS * (default_ms if self.deadline_ms is None else self.deadline_ms)

    def breaker(self, guarded: bool) -> BreakerOptions | None:
        default = _BREAKER_FAILURES if guarded else 0
        failures = default if self.breaker_failures is None else self.breaker_failures
        if not failures:
            return None
        open_s = _BREAKER_OPEN_S if self.breaker_open_s is None else self.breaker_open_s
        return BreakerOptions(failures, open_s * _NS_PER_S)


def read_common(given: Mapping[str, str]) -> tuple[CommonOptions, dict[str, str]]:
    """The common options among the given ones, and the rest."""
    names = {name for name in given if name in CommonOptions.names() or CommonOptions.is_quota(name)}
    own = {name: text for name, text in given.items() if name not in names}
    common = CommonOptions(
        name=given.get("name", ""),
        capacity_bytes=parse_size(given["capacity"]) if "capacity" in given else None,
        quota=_quota(given),
        deadline_ms=_count(given, "deadline_ms"),
        breaker_failures=_count(given, "breaker_failures"),
        breaker_open_s=_count(given, "breaker_open_s", least=1),
        retries=_count(given, "retries") or 0,
        compress=_methods(given.get("compress", "")),
        key_file=given.get("key_file", ""),
        fault=parse_list(given.get("fault", "")),
        fault_seed=_count(given, "fault_seed") or 0,
        unsafe_faults=parse_flag(given.get("unsafe_faults", "false")),
    )
    return common, own


def codecs_of(common: CommonOptions) -> list[Codec]:
    """In the order in which a payload goes through them. Reads the key file; imports what compression needs."""
    from kvcore.l2.compress import Fp8Codec, ZstdCodec
    from kvcore.l2.keyed import KeyedCodec

    codecs: list[Codec] = []
    if "fp8" in common.compress:
        codecs.append(Fp8Codec())
    if "zstd" in common.compress:
        codecs.append(ZstdCodec())
    if common.key_file:
        codecs.append(KeyedCodec.from_file(common.key_file))
    return codecs


def fault_plan(common: CommonOptions) -> FaultPlan | None:
    """None: nothing is broken on purpose. ConfigError without `unsafe_faults=true`, or for a kind nobody knows."""
    if not common.fault:
        return None
    if not common.unsafe_faults:
        raise ConfigError("fault=... breaks a store on purpose; write unsafe_faults=true beside it if you mean that")
    return FaultPlan.parse(common.fault, common.fault_seed)


def check_known(what: str, given: str, known: Iterable[str]) -> None:
    """Refuse `given` and name the nearest known one."""
    names = list(known)
    if given in names:
        return
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {given[:40]!r}; the nearest one is {near[0]!r}, known are {', '.join(names)}")


def _quota(given: Mapping[str, str]) -> Quota | None:
    limits = {name.removeprefix(_QUOTA): parse_size(text) for name, text in given.items() if name.startswith(_QUOTA)}
    default = parse_size(given["quota"]) if "quota" in given else None
    return Quota(limits, default) if limits or default is not None else None


def _count(given: Mapping[str, str], name: str, least: int = 0) -> int | None:
    if name not in given:
        return None
    number = parse_whole(given[name])
    if number < least:
        raise ConfigError(f"{name} = {number} must be at least {least}")
    return number


def _methods(text: str) -> tuple[str, ...]:
    methods = parse_list(text)
    for method in methods:
        check_known("compression", method, _METHODS)
    return methods
