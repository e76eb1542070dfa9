"""`make bench-peers`: the cache server of kvcore and that of LMCache 0.5.6 side by side, in turns, in one run.

Theory of operation
-------------------
Both are real server processes over tcp on loopback, each driven by its own client classes from one client process:
kvcore from this one, LMCache from `peer_lmcache.py` in an environment of its own (`.venv-peers`), because neither must
see the other's dependencies. No line of LMCache is copied here.

    lookups      whole lookups that find everything in the server's memory, `in_flight` at the same time
    long lookup  one prompt of 128K tokens, one at a time
    copies       store and retrieve of new chunks through shared memory, beside one plain copy of the same bytes

Each figure is taken from both in every round, one after the other; what is printed is the median, the least and the
greatest of the rounds, and the ratio of the medians. The processor time of a server is the kernel's clock of that
process, all threads of it. `NOT_COMPARABLE` says what the figures do not show.

Where LMCache cannot be installed it says so in one loud line and ends with 0; with CI=true it fails. TORCH_PIP is what
pip is told to install for torch, as in the Makefile. `--python` takes an environment that has both already.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvcore.bench.figures import median
from kvcore.bench.server import CHUNK_TOKENS, cpu_seconds
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.service.client import LoadCell, SchedulerClient, StoreCell, WorkerClient
from kvcore.service.remote import RemoteConfig, ServerLink

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-peers"
STAMP = ENVIRONMENT / ".kvcore-peers"
PEER = ROOT / "scripts" / "peer_lmcache.py"
LMCACHE = "lmcache==0.5.6"
TORCH = "torch==2.13.0"
PATIENCE_S = 120.0
L1_BATCHES = 4
PEER_ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "ERROR"}

NOT_COMPARABLE = (
    "Who hashes: LMCache's client sends token ids and its server hashes them, at LOOKUP and again when locks are given "
    "back and when the session ends; kvcore's client hashes, and sends hashes. So both lookups include the hashing of "
    "the prompt, but the processor time of the server does in LMCache only; the client's is printed beside it.",
    "The clients: LMCache's hands each request to a thread and waits for a future, kvcore's runs on an asyncio loop. "
    "The lookups per second contain them; the servers' processor time does not.",
    "What a copy is: whole pages that lie in one piece, copied by the client on one thread (kvcore: memoryview, "
    "LMCache: Tensor.copy_). LMCache's worker gathers the blocks of every layer into a slot, which is not measured, as "
    "kvcore's page copier is not; each is measured against a plain copy of the same kind in the same process.",
    "LMCache's copies are its engine-driven path. Its default path (lmcache_driven, where the server copies from GPU "
    "memory) needs a GPU and is not measured at all.",
    "Protection: kvcore's leases belong to an owner and its holds end with the copy; LMCache's read locks are counts "
    "that time out. That work is part of both figures and is not the same work.",
    "LMCache runs as shipped (one thread for requests) but for: engine-driven transfer over shared memory, memory "
    "allocated at start, metrics and logs off. kvcore runs as shipped, metrics server off.",
)


class CannotInstall(Exception):
    """One line: what was tried and what came of it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The defaults are those that figures are quoted with."""

    rounds: int = 5
    lookups: int = 640
    in_flight: int = 64
    lookup_chunks: int = 16
    long_lookups: int = 10
    long_chunks: int = 512
    page_bytes: int = 2 << 20
    batch: int = 64


# -- the environment of the peer


def peer_python() -> Path:
    """Its interpreter, after torch and LMCache were installed beside it."""
    torch = os.environ.get("TORCH_PIP") or TORCH
    wanted = hashlib.sha256("\n".join((torch, LMCACHE, sys.version)).encode()).hexdigest()
    python = ENVIRONMENT / "bin" / "python"
    if not STAMP.is_file() or STAMP.read_text() != wanted:
        STAMP.unlink(missing_ok=True)
        if not python.exists():
            venv.create(ENVIRONMENT, with_pip=True)
        for package in (torch, LMCACHE):
            _pip(python, package)
        STAMP.write_text(wanted)
    return python


def _pip(python: Path, package: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *shlex.split(package)]
    result = subprocess.run(command, check=False, text=True, capture_output=True)
    if result.returncode:
        raise CannotInstall(f"pip install {package} said: {_last_line(result.stderr)}")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"


# -- processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: Sequence[str], log: Path, **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """Ended with the block. What it writes to stderr is in `log`."""
    with log.open("w") as errors:
        started = subprocess.Popen(
            command, stderr=errors, text=True, env={**os.environ, **PEER_ENVIRONMENT}, cwd=log.parent, **pipes
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


class Kvcore:
    """A server of kvcore, and its own clients in this process. `page_bytes`: of one chunk."""

    def __init__(self, stack: ExitStack, directory: Path, page_bytes: int, l1_bytes: int) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        command = [
            sys.executable,
            "-m",
            "kvcore.cli",
            "serve",
            "--listen",
            address,
            "--http",
            "",
            "--log-level",
            "error",
        ]
        command += ["--l1", str(l1_bytes), "--chunk-tokens", str(CHUNK_TOKENS)]
        log = directory / f"kvcore-{page_bytes}.log"
        server = stack.enter_context(process(command, log, stdout=subprocess.PIPE))
        assert server.stdout is not None
        if not server.stdout.readline():
            raise SystemExit(f"kvcore serve did not start: {log.read_text()}")
        self.pid = server.pid
        self._page_bytes = page_bytes
        self._runner = stack.enter_context(asyncio.Runner())
        group = ObjectGroup(GroupKind.FULL, CHUNK_TOKENS, page_bytes)
        layout = CacheLayout((group,), ranks=1, chunk_tokens=CHUNK_TOKENS)
        namespace = Namespace("peers", layout=layout.fingerprint, chunk_tokens=CHUNK_TOKENS)
        self._hasher = ChunkHasher(namespace)
        self._link = ServerLink(self._runner.get_loop(), RemoteConfig((address,)), namespace, layout)
        self._scheduler, self._worker = self._runner.run(self._clients())
        stack.callback(lambda: self._runner.run(self._close()))
        self._source, self._target = memoryview(b""), memoryview(bytearray())
        self._sessions = 0

    async def _clients(self) -> tuple[SchedulerClient, WorkerClient]:
        return self._link.scheduler(), self._link.worker(0)

    async def _close(self) -> None:
        self._link.close()

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("kvcore", "pyzmq", "blake3")} | {"python": sys.version.split()[0]}

    def fill(self, chunks: int) -> None:
        """Store the first `chunks` chunks of the prompt that the lookups ask for."""
        self._runner.run(self._store("fill", self._hasher.hash_tokens(_prompt(chunks)), None))

    def lookups(self, count: int, chunks: int, in_flight: int) -> dict[str, float]:
        """Whole lookups, answered in full: the prompt hashed, LOOKUP, QUERY, then the session ended."""
        begin, cpu = time.perf_counter(), time.process_time()
        self._runner.run(self._lookups(_prompt(chunks), count // in_flight, in_flight))
        done = count // in_flight * in_flight
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu, "count": done}

    async def _lookups(self, prompt: list[int], count: int, in_flight: int) -> None:
        async def one_after_the_other() -> None:
            for _ in range(count):
                await self._lookup(prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(one_after_the_other())

    async def _lookup(self, prompt: list[int]) -> None:
        self._sessions += 1
        session = f"s{self._sessions}"
        hashes = self._hasher.hash_tokens(prompt)
        await self._found(session, hashes)
        self._scheduler.end(session)

    async def _found(self, session: str, hashes: list[bytes]) -> None:
        self._scheduler.start(session, 1, hashes, prompt_tokens=len(hashes) * CHUNK_TOKENS)
        outcome = await self._scheduler.wait(session, 1)
        assert outcome.best == len(hashes), f"only {outcome.best} chunks found: {outcome.reason}"

    def copies(self, turn: int, batch: int) -> dict[str, float]:
        """Store a new batch, retrieve it, and copy the same bytes once between private buffers."""
        size = self._page_bytes
        if not len(self._source):
            self._source, self._target = _private(size * batch, b"x"), _private(size * batch, b"y")
        pages = [slice(size * index, size * (index + 1)) for index in range(batch)]
        return self._runner.run(self._copies(f"c{turn}", [turn, *_prompt(batch)[1:]], pages))

    async def _copies(self, session: str, tokens: list[int], pages: list[slice]) -> dict[str, float]:
        begin = time.perf_counter()
        hashes = self._hasher.hash_tokens(tokens)
        await self._store(session, hashes, pages)
        stored = time.perf_counter() - begin
        await self._found(session, hashes)
        begin = time.perf_counter()
        cells = [LoadCell(0, index, chunk_hash) for index, chunk_hash in enumerate(hashes)]
        grants = await self._worker.open_read(session, 1, cells)
        for page, grant in zip(pages, grants, strict=True):
            assert grant is not None, "a leased cell is readable"
            self._target[page] = grant.view
        assert all(await self._worker.close_read(session, 1, cells))
        loaded = time.perf_counter() - begin
        assert self._target == self._source
        self._scheduler.end(session)
        begin = time.perf_counter()
        for page in pages:
            self._target[page] = self._source[page]
        return {"store": stored, "retrieve": loaded, "plain": time.perf_counter() - begin}

    async def _store(self, session: str, hashes: list[bytes], pages: list[slice] | None) -> None:
        """Without pages the cells are published as they are: what they hold does not matter to lookups."""
        tag = self._worker.tag(self._sessions)
        self._sessions += 1
        grants = await self._worker.reserve_store(tag, [StoreCell(0, chunk_hash) for chunk_hash in hashes])
        for index, grant in enumerate(grants):
            assert grant is not None, "no room in L1"
            if pages is not None:
                grant.view[:] = self._source[pages[index]]
        await self._worker.commit_store(tag, [True] * len(hashes))

    def clear(self) -> None:
        """Nothing: a full L1 gives up what was used longest ago, and its pages have all been touched by then."""


class Lmcache:
    """A server of LMCache, and `peer_lmcache.py` as its client."""

    def __init__(self, stack: ExitStack, directory: Path, python: Path, page_bytes: int, l1_bytes: int) -> None:
        port = free_port()
        name = f"peers-{os.getpid()}-{page_bytes}"
        command = [str(python), "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", name, "--no-l1-use-lazy"]
        command += ["--l1-size-gb", str(max(0.25, l1_bytes / 2**30)), "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--disable-observability"]
        self._logs = [directory / f"{part}-{page_bytes}.log" for part in ("lmcache", "client")]
        server = stack.enter_context(process(command, self._logs[0], stdout=subprocess.DEVNULL))
        self.pid = server.pid
        client = [str(python), str(PEER), f"tcp://127.0.0.1:{port}", str(page_bytes)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._client = stack.enter_context(process(client, self._logs[1], **pipes))
        self._versions = self._reply()

    def _reply(self) -> Any:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            logs = "; ".join(f"{log.stem}: {_last_line(log.read_text())}" for log in self._logs)
            raise SystemExit(f"LMCache is installed, but its client has ended ({logs})")
        return json.loads(line)

    def _ask(self, do: str, **arguments: int) -> Any:
        assert self._client.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._client.stdin, flush=True)
        return self._reply()

    def versions(self) -> dict[str, str]:
        return dict(self._versions)

    def fill(self, chunks: int) -> None:
        self._ask("fill", chunks=chunks)

    def lookups(self, count: int, chunks: int, in_flight: int) -> dict[str, float]:
        return dict(self._ask("lookups", count=count, chunks=chunks, in_flight=in_flight))

    def copies(self, turn: int, batch: int) -> dict[str, float]:
        return dict(self._ask("copies", turn=turn, batch=batch))

    def clear(self) -> None:
        self._ask("clear")


# -- measuring

Side = Kvcore | Lmcache

# name: what it is, its unit, whether more is better
FIGURES = {
    "lookups_per_s": ("whole lookups", "1/s", True),
    "lookup_server_us": ("server's processor time per lookup", "us", False),
    "lookup_client_us": ("client's processor time per lookup", "us", False),
    "long_ms": ("long lookup, one at a time", "ms", False),
    "long_server_ms": ("server's processor time per long lookup", "ms", False),
    "store_gb_per_s": ("store through shared memory", "GB/s", True),
    "retrieve_gb_per_s": ("retrieve through shared memory", "GB/s", True),
    "plain_gb_per_s": ("plain copy of the same bytes", "GB/s", True),
    "store_share": ("store against the plain copy", "", True),
    "retrieve_share": ("retrieve against the plain copy", "", True),
}


def measure(python: Path, sizes: Sizes) -> dict[str, Any]:
    """Everything, as one JSON-able dict."""
    begin = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvp-") as name:
        directory = Path(name)
        with ExitStack() as stack:
            sides = _sides(stack, directory, python, 4096, 256 << 20)
            for side in sides.values():
                side.fill(max(sizes.lookup_chunks, sizes.long_chunks))
            found = _in_turns(sides, sizes.rounds, warm=1, one=lambda side, _: _lookup_round(side, sizes))
            versions = {label: side.versions() for label, side in sides.items()}
        with ExitStack() as stack:
            sides = _sides(stack, directory, python, sizes.page_bytes, L1_BATCHES * sizes.page_bytes * sizes.batch)
            one = partial(_copy_round, sizes=sizes)
            found |= _in_turns(sides, sizes.rounds, warm=L1_BATCHES + 1, one=one)
    return {
        "schema": 1,
        "sizes": asdict(sizes),
        "versions": versions,
        "machine": {"cpus": os.cpu_count(), "load_before": begin, "load_after": os.getloadavg()[0]},
        "figures": {name: _compared(*FIGURES[name], samples) for name, samples in found.items()},
        "not_comparable": list(NOT_COMPARABLE),
    }


def _sides(stack: ExitStack, directory: Path, python: Path, page_bytes: int, l1_bytes: int) -> dict[str, Side]:
    # LMCache begins to evict at four fifths, and must not here
    lmcache = Lmcache(stack, directory, python, page_bytes, 2 * l1_bytes)
    return {"kvcore": Kvcore(stack, directory, page_bytes, l1_bytes), "lmcache": lmcache}


def _in_turns(
    sides: dict[str, Side], rounds: int, *, warm: int, one: Callable[[Side, int], dict[str, float]]
) -> dict[str, dict[str, list[float]]]:
    """Per figure and side the samples of `rounds` rounds, after `warm` ones that do not count."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(warm + rounds):
        for label, side in sides.items():
            for name, value in one(side, turn).items():
                if turn >= warm:
                    found.setdefault(name, {}).setdefault(label, []).append(value)
    return found


def _lookup_round(side: Side, sizes: Sizes) -> dict[str, float]:
    before = cpu_seconds(side.pid)
    short = side.lookups(sizes.lookups, sizes.lookup_chunks, sizes.in_flight)
    between = cpu_seconds(side.pid)
    long = side.lookups(sizes.long_lookups, sizes.long_chunks, 1)
    after = cpu_seconds(side.pid)
    return {
        "lookups_per_s": short["count"] / short["seconds"],
        "lookup_server_us": 1e6 * (between - before) / short["count"],
        "lookup_client_us": 1e6 * short["cpu_seconds"] / short["count"],
        "long_ms": 1e3 * long["seconds"] / long["count"],
        "long_server_ms": 1e3 * (after - between) / long["count"],
    }


def _copy_round(side: Side, turn: int, sizes: Sizes) -> dict[str, float]:
    took = side.copies(turn, sizes.batch)
    if turn % L1_BATCHES == L1_BATCHES - 1:
        side.clear()
    total = sizes.page_bytes * sizes.batch / 1e9
    rates = {f"{name}_gb_per_s": total / seconds for name, seconds in took.items()}
    return rates | {f"{name}_share": took["plain"] / took[name] for name in ("store", "retrieve")}


def _compared(what: str, unit: str, more_is_better: bool, samples: dict[str, list[float]]) -> dict[str, Any]:
    """`advantage`: how many times as good kvcore is, by the medians."""
    middle = {label: median(values) for label, values in samples.items()}
    ratio = middle["kvcore"] / middle["lmcache"]
    spread = {
        label: {"median": middle[label], "min": min(values), "max": max(values), "n": len(values)}
        for label, values in samples.items()
    }
    return {"what": what, "unit": unit, "advantage": ratio if more_is_better else 1 / ratio, **spread}


# -- the report


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For people."""
    sizes, machine = found["sizes"], found["machine"]
    for label, versions in found["versions"].items():
        yield f"{label}: " + ", ".join(f"{name} {text}" for name, text in versions.items())
    loads = f"load {machine['load_before']:.1f} before, {machine['load_after']:.1f} after"
    yield f"{machine['cpus']} processors, {loads}"
    yield (
        f"lookup: {sizes['lookup_chunks']} chunks of {CHUNK_TOKENS} tokens, {sizes['in_flight']} in flight; "
        f"long lookup: {sizes['long_chunks']} chunks; copies: {sizes['batch']} chunks of {sizes['page_bytes']} bytes"
    )
    yield f"{'median (least - greatest)':<42}{'kvcore':>28}{'LMCache':>28}{'times as good':>15}"
    for figure in found["figures"].values():
        sides = "".join(f"{_spread(figure[label]):>28}" for label in ("kvcore", "lmcache"))
        unit = f" [{figure['unit']}]" if figure["unit"] else ""
        name = figure["what"] + unit
        yield f"{name:<42}{sides}{figure['advantage']:>15.2f}"
    yield f"n = {next(iter(found['figures'].values()))['kvcore']['n']} rounds, in turns. What this does not show:"
    yield from (f"  - {text}" for text in found["not_comparable"])


def _spread(side: dict[str, float]) -> str:
    return f"{_short(side['median'])} ({_short(side['min'])} - {_short(side['max'])})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _private(size: int, filled_with: bytes) -> memoryview:
    """Touched, and aligned as tensors are."""
    buffer = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    buffer[:] = filled_with * size
    return buffer


def _prompt(chunks: int) -> list[int]:
    return list(range(chunks * CHUNK_TOKENS))


def main() -> int:
    parser = argparse.ArgumentParser(description="kvcore's cache server and LMCache's, side by side.")
    parser.add_argument("--python", type=Path, help="an interpreter that has torch and LMCache already")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a first impression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=3, lookups=256, long_lookups=3) if arguments.quick else Sizes()
    try:
        found = measure(arguments.python or peer_python(), sizes)
    except CannotInstall as error:
        print(f"##### LMCACHE IS NOT THERE, the comparison is SKIPPED: {error} #####", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
