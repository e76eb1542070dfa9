"""From a URL to an adapter.

    memory:                                   in this process, gone with it
    file:///var/cache/kv?capacity=200GiB      a directory of this process alone
    slab:///var/cache/kv?capacity=200GiB      the same in a few large files
    fs:///mnt/shared/kv?capacity=1TiB         a directory shared by processes
    redis://:secret@host:6379/0               also rediss, valkey, valkeys, redis+unix
    s3://bucket/prefix?endpoint=...           also gs, az, objectstore+file, objectstore+memory
    mooncake://master:50051?protocol=tcp
    nixl+posix:///var/cache/kv
    nixl+ucx:///run/kvcore/pool.sock          memory of a `kvcore store pool`

`docs/stores.md` has each store's options. These belong to every URL (`kvcore.l2.open_options`):

    capacity=200GiB  quota=10GiB  quota.SALT=1GiB    bytes of whole records; per tenant; for one tenant
    name=tier2                                       in metrics and messages
    deadline_ms, breaker_failures, breaker_open_s, retries      what stands around a store that may not answer
    compress=zstd, fp8   key_file=PATH                          what is done to payloads
    fault=KIND:ONE_IN   unsafe_faults=true                      breaks things on purpose

Theory of operation
-------------------
1. `parse_store` understands the whole URL, or refuses it with the nearest thing that is known. Nothing is touched.
2. `StoreSpec.open_backend` opens the store, blocking: it may run in any thread. Codecs stand between adapter and store
   as backends of their own, the last to encode is the nearest to the store.
3. `StoreSpec.build` makes the adapter and its guards around it, on the loop thread, without blocking.

`open_adapter` does all three. Error texts never repeat the URL: it may hold a password.

Who holds: the adapter belongs to the caller, who closes it before the executor. A backend that was opened and not built
into an adapter is closed by whoever opened it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvcore.config.sources import Field
from kvcore.config.values import redact_url
from kvcore.errors import ConfigError
from kvcore.l2.adapter import LockKind
from kvcore.l2.breaker import BreakerAdapter
from kvcore.l2.coded import Codec, coded
from kvcore.l2.deadline import DeadlineAdapter, DeadlineExecutor
from kvcore.l2.faulty import FaultyAdapter, FaultyExecutor, faulty_backend
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.open_options import CommonOptions, check_known, codecs_of, fault_plan, read_common
from kvcore.l2.open_schemes import SCHEMES, build_options, option_fields, parse_option
from kvcore.l2.retry import RetryAdapter, RetryOptions
from kvcore.l2.shared import SharedAdapter
from kvcore.l2.shared_backend import RegionBackend
from kvcore.l2.wrapped import CountingAdapter
from kvcore.l2.wrapped_backend import AnyBackend, is_exclusive, is_shared, opened
from kvcore.ports import Clock, Executor, Notice
from kvcore.quota import Quota


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """An understood URL. `shown` is the URL without secrets; `options` is the struct of its family."""

    scheme: str
    shown: str
    common: CommonOptions
    options: Any = field(repr=False)

    @property
    def name(self) -> str:
        return self.common.name or self.scheme

    def limited(self, capacity_bytes: int | None, quota: Quota | None) -> StoreSpec:
        """The same store with other limits. *Opening it may evict what is beyond them.*"""
        common = replace(self.common, capacity_bytes=capacity_bytes, quota=quota)
        options = self.options
        if capacity_bytes is not None and hasattr(options, "capacity_bytes"):
            options = replace(options, capacity_bytes=capacity_bytes)
        return replace(self, common=common, options=options)

    def unopened(self) -> AnyBackend:
        """The store as it is, without codecs and faults. No I/O."""
        return SCHEMES[self.scheme].open_backend(self.options)

    def codecs(self) -> list[Codec]:
        """What payloads go through, in this order. ConfigError: a key file or a library is missing."""
        return codecs_of(self.common)

    def open_backend(self, region: memoryview | None = None) -> AnyBackend:
        """The store, opened, behind its codecs. Blocking. ConfigError: never; StoreError, OSError: not now.

        `region`: the memory in which callers' buffers lie, for stores that then need no copy. With a codec between,
        the store sees only the codec's own memory, so the region is not made known.
        """
        backend = self.unopened()
        codecs = self.codecs()
        if region is not None and not codecs and isinstance(backend, RegionBackend):
            backend.register_region(region)
        plan = fault_plan(self.common)
        if plan is not None:
            backend = faulty_backend(backend, plan)
        for codec in reversed(codecs):
            backend = coded(backend, codec)
        return opened(backend)

    def build(
        self,
        backend: AnyBackend,
        *,
        executor: Executor,
        notice_factory: Callable[[], Notice],
        clock: Clock,
        name: str | None = None,
        quota: Quota | None = None,
    ) -> CountingAdapter:
        """The adapter over an opened backend, with its guards. On the loop thread."""
        made = _Guarded(self, executor, notice_factory, clock)
        return made.build(backend, name or self.name, quota or self.common.quota)


class _Guarded:
    """Puts one adapter together; what counts failures is known only while that is done."""

    def __init__(self, spec: StoreSpec, executor: Executor, notice_factory: Callable[[], Notice], clock: Clock) -> None:
        self._common = spec.common
        self._guarded = SCHEMES[spec.scheme].guarded
        self._plan = fault_plan(spec.common)
        self._executor = executor
        self._notice_factory = notice_factory
        self._clock = clock
        self._deadline_ns = spec.common.deadline_ns(self._guarded)
        self._timed: DeadlineExecutor | None = None

    def build(self, backend: AnyBackend, name: str, quota: Quota | None) -> CountingAdapter:
        adapter = bottom = self._bottom(backend, name, quota)
        if self._plan is not None:
            adapter = FaultyAdapter(adapter, self._plan)
        if self._deadline_ns:
            adapter = DeadlineAdapter(adapter, self._notice_factory, self._deadline_ns, self._timed)

        def failures_seen() -> int:
            return bottom.statistics().io_errors + (self._timed.late if self._timed is not None else 0)

        if self._common.retries:
            options = RetryOptions(attempts_max=1 + self._common.retries)
            adapter = RetryAdapter(adapter, self._clock, options, failures_seen=failures_seen)
        breaker = self._common.breaker(self._guarded)
        if breaker is not None:
            remote = bottom.lock_strength.kind is not LockKind.STRONG
            adapter = BreakerAdapter(adapter, self._clock, breaker, failures_seen=failures_seen, remote_lookups=remote)
        return adapter

    def _bottom(self, backend: AnyBackend, name: str, quota: Quota | None) -> CountingAdapter:
        executor = self._executor
        if self._plan is not None:
            executor = FaultyExecutor(executor, self._plan)
        if self._deadline_ns:
            executor = self._timed = DeadlineExecutor(executor, self._deadline_ns)
        capacity = self._common.capacity_bytes
        if is_shared(backend):
            return SharedAdapter(name, backend, executor, self._notice_factory, self._clock, capacity, quota=quota)
        assert is_exclusive(backend)
        return IndexedAdapter(name, backend, executor, self._notice_factory, capacity, quota=quota)


def open_adapter(
    url: str,
    *,
    executor: Executor,
    notice_factory: Callable[[], Notice],
    clock: Clock,
    quota: Quota | None = None,
    region: memoryview | None = None,
) -> CountingAdapter:
    """The adapter that `url` names, opened. ConfigError: one line that says what is wrong with it. Blocking.

    `region`: see `StoreSpec.open_backend`.
    """
    spec = parse_store(url)
    backend = spec.open_backend(region)
    try:
        return spec.build(backend, executor=executor, notice_factory=notice_factory, clock=clock, quota=quota)
    except BaseException:
        backend.close()
        raise


def parse_store(url: str) -> StoreSpec:
    """Understand `url`. Raises ConfigError; its text holds no part of the URL that could be a secret."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError("an L2 store's URL cannot be taken apart: look at its host, port and brackets") from None
    del port
    if not parts.scheme:
        raise ConfigError("an L2 store is named by a URL with a scheme: file:///var/cache/kv for a directory, memory:")
    check_known("L2 scheme", parts.scheme, SCHEMES)
    scheme = SCHEMES[parts.scheme]
    address = scheme.address(parts)
    fields = option_fields(scheme, address)
    given = _given(parts, fields)
    common, own = read_common(given)
    if "capacity" in fields:  # such a store allocates its room and has to know it
        if "capacity" not in given:
            raise ConfigError(f"a {parts.scheme} store needs its capacity: {parts.scheme}:...?capacity=200GiB")
        own["capacity"] = given["capacity"]
    parsed = {fields[name].path: parse_option(name, fields[name], text) for name, text in own.items()}
    options = build_options(scheme, address, parsed)
    fault_plan(common)  # a bad one is refused here and not when the store is opened
    return StoreSpec(parts.scheme, redact_url(url), common, options)


def _given(parts: SplitResult, fields: dict[str, Field]) -> dict[str, str]:
    known = [*fields, *CommonOptions.names()]
    options: dict[str, str] = {}
    for option, value in parse_qsl(parts.query, keep_blank_values=True):
        if not CommonOptions.is_quota(option):
            check_known(f"option of a {parts.scheme} store", option, known)
        if option in options and option != "fault":
            raise ConfigError(f"the option {option} is given twice")
        if not value:
            raise ConfigError(f"the option {option} has no value")
        options[option] = f"{options[option]},{value}" if option in options else value
    return options
