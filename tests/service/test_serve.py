"""`kvcore serve` as a process: what engines, operators and other servers meet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvcore.answers import Answer
from kvcore.errors import PeerError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.service.client import ConnectionConfig, ConnectionState, LoadCell, SchedulerConfig, StoreCell
from kvcore.service.remote import MappedSegments, RemoteConfig, ServerLink

T = TypeVar("T")
Serve = Callable[..., Any]
Command = Callable[..., subprocess.CompletedProcess[str]]

CHUNK = 16
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK, 4096),), ranks=1, chunk_tokens=CHUNK)
NAMESPACE = Namespace("tiny", layout=LAYOUT.fingerprint, chunk_tokens=CHUNK)
TOKENS = list(range(8 * CHUNK))
HASHES = ChunkHasher(NAMESPACE).hash_tokens(TOKENS)
PATIENCE_S = 60.0
PATIENT = ("--timeout", str(PATIENCE_S))
PATIENCE_NS = 60_000_000_000
CONNECTION = ConnectionConfig(request_timeout_ns=PATIENCE_NS, hello_interval_ns=100_000_000)
LOOKUP = SchedulerConfig(lookup_timeout_ns=PATIENCE_NS, server_timeout_ns=PATIENCE_NS)


def payload(index: int) -> bytes:
    return bytes([index + 1]) * LAYOUT.cell_bytes(0)


class Engine:
    """A scheduler and a worker of one tiny engine."""

    def __init__(self, address: str, layout: CacheLayout = LAYOUT, namespace: Namespace = NAMESPACE) -> None:
        config = RemoteConfig((address,), connection=CONNECTION, lookup=LOOKUP)
        self.link = ServerLink(asyncio.get_running_loop(), config, namespace, layout)
        self.scheduler = self.link.scheduler()
        self.worker = self.link.worker(0)
        self._numbers = 0

    def next(self) -> int:
        self._numbers += 1
        return self._numbers

    async def store(self, chunks: range) -> list[Answer]:
        tag = self.worker.tag(self.next())
        grants = await self.worker.reserve_store(tag, [StoreCell(0, HASHES[index]) for index in chunks])
        for index, grant in zip(chunks, grants, strict=True):
            if grant is not None:
                grant.view[:] = payload(index)
        return await self.worker.commit_store(tag, [grant is not None for grant in grants])

    async def lookup(self, session: str) -> int:
        """Chunks of the hit."""
        generation = self.next()
        self.scheduler.start(session, generation, HASHES, prompt_tokens=len(TOKENS) + 1)
        outcome = await self.scheduler.wait(session, generation)
        self.scheduler.settle(session, generation, outcome.best)
        self._last = generation
        return outcome.best

    async def load(self, session: str, chunks: range) -> list[bytes | None]:
        cells = [LoadCell(0, index, HASHES[index]) for index in chunks]
        grants = await self.worker.open_read(session, self._last, cells)
        copies = [bytes(grant.view) if grant is not None else None for grant in grants]
        held = await self.worker.close_read(session, self._last, cells)
        return [copy if fine else None for copy, fine in zip(copies, held, strict=True)]


def run(address: str, body: Callable[[Engine], Coroutine[Any, Any, T]], **engine: Any) -> T:
    async def main() -> T:
        async with asyncio.timeout(PATIENCE_S):
            this = Engine(address, **engine)
            try:
                return await body(this)
            finally:
                this.link.close()

    return asyncio.run(main())


async def _store_and_load(engine: Engine) -> list[bytes | None]:
    assert await engine.store(range(4)) == [Answer.PUBLISHED] * 4
    assert await engine.lookup("q") == 4
    return await engine.load("q", range(4))


def segment_of(server: Any) -> Path:
    """The shared memory that this server has mapped; other tests have servers of their own at the same time."""
    maps = Path(f"/proc/{server.pid}/maps").read_text().split()
    (name,) = {word for word in maps if word.startswith("/dev/shm/kvcore-")}
    assert Path(name).exists()
    return Path(name)


def test_an_engine_stores_and_loads_through_shared_memory(serve: Serve) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    assert run(server.address, _store_and_load) == [payload(index) for index in range(4)]


def test_what_one_engine_stored_another_one_finds(serve: Serve) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    run(server.address, lambda engine: engine.store(range(8)))
    assert run(server.address, lambda engine: engine.lookup("other")) == 8


def test_files_behind_l1_outlive_a_killed_server_and_its_segment_is_removed(
    serve: Serve, directory: Path, patient: dict[str, str]
) -> None:
    """S57: shared memory of a killed process is freed by the next."""
    store = f"file://{directory}/kv"
    server = serve("--chunk-tokens", str(CHUNK), "--l2", store, environ=patient)
    segment = segment_of(server)
    run(server.address, lambda engine: engine.store(range(4)))
    wait_for(lambda: len(list((directory / "kv").rglob("*.kv"))) == 4)
    server.stop(number=signal.SIGKILL)
    again = serve("--chunk-tokens", str(CHUNK), "--l2", store, environ=patient)
    assert run(again.address, lambda engine: engine.lookup("q")) == 4
    assert not segment.exists(), "the killed server's segment is still there"


def test_a_termination_ends_in_time_and_leaves_nothing(serve: Serve, directory: Path) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    segment = segment_of(server)
    run(server.address, _store_and_load)
    assert server.stop(number=signal.SIGTERM) == 0
    assert not segment.exists()
    assert not (directory / "s.sock").exists()


def test_a_second_server_on_the_same_address_is_refused_and_the_first_one_serves_on(
    serve: Serve, command: Command, directory: Path
) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    second = command("serve", "--listen", f"ipc://{directory}/s.sock", "--l1", "1MiB")
    assert second.returncode == 2
    assert "another server listens there" in second.stderr
    assert run(server.address, _store_and_load)


def test_another_chunk_size_is_refused_with_both_numbers(serve: Serve) -> None:
    server = serve("--chunk-tokens", "32")

    async def body(engine: Engine) -> str:
        await engine.store(range(1))
        connection = engine.link.connections[1]
        assert connection.state is ConnectionState.REFUSED
        return connection.refusal

    said = run(server.address, body)
    assert "32" in said
    assert "16" in said


def test_a_second_model_is_refused_by_a_server_that_has_one(serve: Serve) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    run(server.address, _store_and_load)
    other = Namespace("other", layout=LAYOUT.fingerprint, chunk_tokens=CHUNK)

    async def body(engine: Engine) -> str:
        assert await engine.store(range(1)) == [Answer.UNKNOWN]
        return engine.link.connections[1].refusal

    assert "tiny" in run(server.address, body, namespace=other)


def test_a_model_whose_chunks_do_not_fit_is_refused(serve: Serve) -> None:
    layout = replace(LAYOUT, groups=(ObjectGroup(GroupKind.FULL, CHUNK, 12 << 20),))
    server = serve("--chunk-tokens", str(CHUNK), l1="16MiB")

    async def body(engine: Engine) -> str:
        await engine.store(range(1))
        return engine.link.connections[1].refusal

    namespace = replace(NAMESPACE, layout=layout.fingerprint)
    assert "two chunks of this model need" in run(server.address, body, layout=layout, namespace=namespace)
    assert run(server.address, _store_and_load)


def test_more_l1_than_shared_memory_is_refused_and_nothing_stays(command: Command, directory: Path) -> None:
    listen = f"ipc://{directory}/s.sock"
    result = command("serve", "--listen", listen, "--l1", "900TiB")
    assert result.returncode == 2
    assert "shared memory" in result.stderr
    assert not (directory / "s.sock").exists()


def test_a_store_that_does_not_answer_is_used_when_it_comes(
    serve: Serve, directory: Path, patient: dict[str, str]
) -> None:
    blocker = directory / "mount"
    blocker.write_text("not a directory")  # as a file system that is not mounted yet
    server = serve("--chunk-tokens", str(CHUNK), "--l2", f"file://{blocker}/kv", environ=patient)
    assert "does not answer" in server.text
    assert run(server.address, _store_and_load) == [payload(index) for index in range(4)]
    blocker.unlink()
    wait_for(lambda: "is there now" in server.text)

    async def new_chunk(engine: Engine) -> list[Answer]:
        return await engine.store(range(4, 6))

    run(server.address, new_chunk)
    wait_for(lambda: len(list((blocker / "kv").rglob("*.kv"))) >= 2)


def test_a_worker_that_is_killed_while_it_copies_is_proven_dead_and_its_memory_comes_back(
    serve: Serve, directory: Path
) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    code = f"""
import asyncio
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.service.client import ConnectionConfig, StoreCell
from kvcore.service.remote import RemoteConfig, ServerLink

async def main():
    layout = CacheLayout((ObjectGroup(GroupKind.FULL, {CHUNK}, 4096),), ranks=1, chunk_tokens={CHUNK})
    namespace = Namespace("tiny", layout=layout.fingerprint, chunk_tokens={CHUNK})
    config = RemoteConfig(({server.address!r},), connection=ConnectionConfig(request_timeout_ns={PATIENCE_NS}))
    link = ServerLink(asyncio.get_running_loop(), config, namespace, layout)
    worker = link.worker(0)
    await worker.reserve_store(worker.tag(1), [StoreCell(0, bytes([n]) * 32) for n in range(4)])
    print("copying", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "copying\n"
        l1 = status_of(server)["storage"]["l1"]
        assert (l1["objects_staging"], l1["holds"]) == (4, 4)
        child.kill()
    wait_for(lambda: status_of(server)["server"]["workers"] == 0)
    l1 = status_of(server)["storage"]["l1"]
    assert (l1["bytes_used"], l1["holds"], l1["quarantined_bytes"]) == (0, 0, 0)


def status_of(server: Any) -> dict[str, Any]:
    with urllib.request.urlopen(server.http + "/status", timeout=PATIENCE_S) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def test_the_operator_asks_and_clears(serve: Serve, command: Command) -> None:
    server = serve("--chunk-tokens", str(CHUNK))
    assert json.loads(command("status", server.address, *PATIENT).stdout)["waiting_for_engine"] == 1
    run(server.address, _store_and_load)
    assert command("ping", server.address, *PATIENT).returncode == 0
    assert json.loads(command("status", server.address, *PATIENT).stdout)["requests"] > 5
    wait_for(lambda: "4 objects" in command("clear", server.address, *PATIENT).stdout)
    assert run(server.address, lambda engine: engine.lookup("q")) == 0


def test_an_operator_without_a_server_is_told_so(command: Command, directory: Path) -> None:
    result = command("ping", f"ipc://{directory}/nobody.sock", "--timeout", "0.2")
    assert result.returncode == 1
    assert "is `kvcore serve` running there?" in result.stderr


def test_socket_and_directory_are_private(serve: Serve, directory: Path) -> None:
    serve("--listen", f"ipc://{directory}/inner/s.sock")
    assert stat.S_IMODE((directory / "inner").stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "inner" / "s.sock").stat().st_mode) == 0o600


def test_a_directory_that_others_can_write_is_refused(command: Command, directory: Path) -> None:
    (directory / "open").mkdir()
    (directory / "open").chmod(0o777)
    result = command("serve", "--listen", f"ipc://{directory}/open/s.sock", "--l1", "1MiB")
    assert result.returncode == 2
    assert "can be written by others" in result.stderr


def test_print_config_shows_sources_and_starts_nothing(command: Command, directory: Path) -> None:
    result = command(
        "serve", "--l2", "redis://:secret@h", "--print-config", environ={"KVCORE_L1_CAPACITY_BYTES": "2GiB"}
    )
    assert result.returncode == 0
    assert "capacity_bytes = 2147483648  # KVCORE_L1_CAPACITY_BYTES" in result.stdout
    assert "secret" not in result.stdout.replace("secret_file", "")


def test_clients_with_keys_are_served_over_tcp(serve: Serve, command: Command, directory: Path) -> None:
    for folder, name in ((directory, "server"), (directory / "clients", "operator")):
        assert command("keys", str(folder), name).returncode == 0
    server = serve(
        "--listen", "tcp://127.0.0.1:0", "--curve-secret", f"{directory}/server.key_secret",
        "--curve-clients", f"{directory}/clients",
    )  # fmt: skip
    keys = ("--curve-secret", f"{directory}/clients/operator.key_secret", "--curve-server", f"{directory}/server.key")
    assert command("ping", server.address, *keys, *PATIENT).returncode == 0
    assert command("ping", server.address, "--timeout", "0.5").returncode == 1


def test_a_segment_that_is_not_ours_is_not_mapped(directory: Path) -> None:
    foreign = Path(f"/dev/shm/kvcore-foreign-{os.getpid()}")
    foreign.write_bytes(b"x" * 4096)
    foreign.chmod(0o644)
    try:
        with pytest.raises(PeerError, match="open to other users"):
            MappedSegments()(foreign.name)
    finally:
        foreign.unlink()


def test_a_segment_that_somebody_else_made_is_not_removed_at_start(serve: Serve) -> None:
    foreign = Path(f"/dev/shm/kvcore-foreign-{os.getpid()}")
    foreign.write_bytes(b"x" * 4096)
    foreign.chmod(0o644)
    try:
        serve("--chunk-tokens", str(CHUNK))
        assert foreign.exists()
    finally:
        foreign.unlink()


def wait_for(happened: Callable[[], bool]) -> None:
    """Until another process has done something; there is nothing to wait on but what it leaves behind."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
