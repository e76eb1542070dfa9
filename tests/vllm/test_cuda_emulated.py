"""`KvcoreConnector` on a CUDA device that is emulated on the host, under vLLM's scheduler: the engine's forward passes
are late, its streams change, copies take their time; every slot is right, and each link of the event order that is left
out is caught. The device lies behind `compute_runtime`; what is chosen for it, and all behind it, is the real thing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcore.connectors.vllm import connector as connector_module
from kvcore.connectors.vllm import moving
from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.device.movers import Mover, cpu_mover
from kvcore.ladder.emulated_cuda import EmulatedCuda
from kvcore.ladder.targets.vllm_scheduler.case import Case, CaseRequest
from kvcore.ladder.targets.vllm_scheduler.engine import make_config, make_kv_config, make_request, make_scheduler
from kvcore.ladder.targets.vllm_scheduler.fake_runner import FakeRunner, Finding
from kvcore.ladder.targets.vllm_scheduler.tokens import reference
from kvcore.runtime.child import ENDS_IN_S, ServerChild
from kvcore.runtime.streams import Job

CASE = Case(
    seed=0,
    requests=tuple(CaseRequest(f"r{i}", tuple(range(i + 1, i + 70)), 12) for i in range(6)),
    num_blocks=40,
)
IN_PROCESS: dict[str, Any] = {"l1_bytes": 1 << 20}
STEPS_MAX = 200_000
STORE_S = 0.05
"""A forward pass is held until a copy out of its pages has moved, which must not be; or until so long has gone by."""
COPY_S = 0.004
"""A copy out of pages is held until it was published, which must not be; or until so long has gone by."""
UNWRITTEN = np.uint64(0xA5A5_A5A5_A5A5_A5A5)


class LateMover:
    name = "late"

    def __init__(self, inner: Mover) -> None:
        self._inner = inner
        self.moved, self.published = threading.Event(), threading.Event()

    def move(self, copy: Any) -> None:
        self.moved.set()
        self.published.wait(COPY_S)
        self._inner.move(copy)


class Gpu(EmulatedCuda):
    """An emulated device as the connector sees it, whose engine computes on another stream in every step."""

    def __init__(self) -> None:
        self.mover = LateMover(cpu_mover())
        super().__init__(mover=self.mover)
        self.current = self.compute
        self.pins = [0, 0]
        self.serving = False

    def follow(self) -> None:
        self.compute = self.current

    def pin(self, buffer: memoryview) -> None:
        self.pins[0] += 1

    def unpin(self, buffer: memoryview) -> None:
        self.pins[1] += 1

    def next_stream(self) -> None:
        self.catch_up()
        self.current = self.new_stream()

    def catch_up(self) -> None:
        """The engine's thread waits for what it has queued."""
        self.release(self.current)
        self.synchronize(self.record(self.current))


class GpuRunner(FakeRunner):
    """Its writes are queued on the device, and late; it waits for them before it reads."""

    def __init__(self, case: Case, connector: Any, findings: list[Finding], gpu: Gpu) -> None:
        self._gpu = gpu
        super().__init__(case, connector, findings)

    def execute(self, output: Any) -> Any:
        self._gpu.next_stream()
        self._gpu.mover.moved.clear()
        self._stores = output.kv_connector_metadata.step.stores
        return super().execute(output)

    def _check(self, name: str) -> str:
        self._gpu.catch_up()
        return super()._check(name)

    def _write(self, name: str, count: int, *, garbage: bool) -> None:
        real, self.pages = self.pages, np.full_like(self.pages, UNWRITTEN)
        try:
            super()._write(name, count, garbage=garbage)
        finally:
            written, self.pages = self.pages, real
        self._gpu.hold(self._gpu.current)
        self._gpu.compute_on(self._gpu.current, lambda: np.copyto(real, written, where=written != UNWRITTEN))

    def _reports(self, output: Any) -> Any:
        """All hooks of the step but the last ones have been called."""
        if self._stores:
            self._gpu.mover.moved.wait(STORE_S)
        self._gpu.release(self._gpu.current)
        return super()._reports(output)


class Engine:
    """A scheduler and a worker; on the host without a device. `published`: bytes of each cell when it was published."""

    def __init__(self, gpu: Gpu | None, case: Case, **extra: Any) -> None:
        transfer = {
            "kv_connector": "KvcoreConnector",
            "kv_connector_module_path": "kvcore.connectors.vllm",
            "kv_connector_extra_config": {"chunk_tokens": 16, **extra},
        }
        config, kv_config = make_config(case, transfer), make_kv_config(case)
        self._case = case
        self.scheduler = make_scheduler(case, config, kv_config)
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
        self.findings: list[Finding] = []
        self.published: dict[Any, bytes] = {}
        self._gpu, self._passes = gpu, 0
        if self.worker._attached.host is not None and gpu is not None:
            self._watch(self.worker._attached.host, gpu)
        if gpu is None:
            self._runner = FakeRunner(case, self.worker, self.findings)
        else:
            self._runner = GpuRunner(case, self.worker, self.findings, gpu)
            gpu.serving = True

    def _watch(self, host: Any, gpu: Gpu) -> None:
        commit = host.storage.commit_store

        def committed(tag: str, holder: str, keys: Any) -> Any:
            answers = commit(tag, holder, keys)
            for key in keys:
                self.published.setdefault(key, self._bytes_of(key))
            gpu.mover.published.set()
            gpu.mover.published.clear()
            return answers

        host.storage.commit_store = committed

    def _bytes_of(self, key: Any) -> bytes:
        l1 = self.worker._attached.host.l1
        return bytes(l1.view(l1.slot_of(key)))

    def changed_later(self) -> list[Any]:
        """Cells that were published before all their bytes were there."""
        return [key for key, then in self.published.items() if self._bytes_of(key) != then]

    def serve(self) -> None:
        """All requests at once, from an empty prefix cache."""
        self._passes += 1
        tokens: dict[str, list[int]] = {}
        for request in self._case.requests:
            name = f"{request.request_id}.{self._passes}"
            tokens[name] = []
            self.scheduler.add_request(make_request(replace(request, request_id=name), 0.0))
        self._run(tokens)
        for request in self._case.requests:
            assert tokens[f"{request.request_id}.{self._passes}"] == reference(request.prompt, request.output_tokens)
        assert self.scheduler.reset_prefix_cache()

    def _run(self, tokens: dict[str, list[int]]) -> None:
        for _ in range(STEPS_MAX):
            if not self.scheduler.has_requests():
                return
            output = self.scheduler.schedule()
            for outputs in self.scheduler.update_from_output(output, self._runner.execute(output)).values():
                for each in outputs.outputs:
                    tokens[each.request_id].extend(each.new_token_ids)
        raise AssertionError("not done")

    @property
    def moved(self) -> Any:
        return self.worker._side.worker.statistics()

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.catch_up()
        self.scheduler.connector.shutdown()
        self.worker.shutdown()


@contextmanager
def engine_of(gpu: Gpu | None, case: Case = CASE, **extra: Any) -> Iterator[Engine]:
    engine = Engine(gpu, case, **extra)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    device = Gpu()
    monkeypatch.setattr(connector_module, "compute_runtime", lambda pages: device)
    yield device
    device.close()


@pytest.mark.parametrize(("windows", "load_async"), [((None,), True), ((None,), False), ((None, 20), True)])
def test_on_a_device_a_second_pass_hits_and_every_slot_is_right(gpu: Gpu, windows: Any, load_async: bool) -> None:
    case = replace(CASE, windows=windows)
    with engine_of(gpu, case, load_async=load_async, **IN_PROCESS) as engine:
        assert isinstance(engine.worker._side.mover.device, CudaCopyEngine)
        engine.serve()
        engine.serve()
        assert (engine.findings, engine.changed_later()) == ([], [])
        assert engine.moved.loads >= len(CASE.requests)
        assert engine.moved.loads_failed == 0
        assert len(engine.published) == engine.moved.cells_stored > 0
    assert gpu.pins == [1, 1], "L1's memory is locked as long as the device knows it"


def test_what_an_engine_on_the_host_has_stored_an_engine_on_a_device_loads(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/server.sock"
    arguments = ("--listen", address, "--l1", "1MiB", "--chunk-tokens", "16", "--http", "")
    child = ServerChild(tmp_path / "server.log", *arguments).started()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(connector_module, "compute_runtime", moving.compute_runtime)
            with engine_of(None, servers=address) as engine:
                engine.serve()
                stored = engine.moved.cells_stored
        with engine_of(gpu, servers=address) as engine:
            engine.serve()
            assert engine.findings == []
            assert engine.moved.loads >= len(CASE.requests)
            assert engine.moved.cells_stored < stored, "they had the same keys"
    finally:
        assert child.stop(ENDS_IN_S) == 0


# -- what is left out is caught


class ProducerIsNotWaitedFor(CudaCopyEngine):
    def submit(self, copies: Any, *, stream: str, after: Any = ()) -> Job:
        return super().submit(copies, stream=stream, after=() if self._runtime.serving else after)


class DoneWhenQueued(CudaCopyEngine):
    def _carry_out(self, stream: Any, copies: Any) -> None:
        if not self._runtime.serving:  # registration would see it at once
            return super()._carry_out(stream, copies)
        for copy in copies:
            self._runtime.queue(stream, copy)
        return None


def found(gpu: Gpu) -> tuple[set[str], bool]:
    """(kinds of findings, something was published too early) of two passes."""
    with engine_of(gpu, **IN_PROCESS) as engine:
        engine.serve()
        gpu.catch_up()
        early = bool(engine.changed_later())
        engine.serve()
        return {finding.kind for finding in engine.findings}, early


def test_copies_that_do_not_wait_for_the_forward_pass_are_caught(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "CudaCopyEngine", ProducerIsNotWaitedFor)
    assert found(gpu)[0] == {"slot"}


def test_copies_that_are_done_when_they_are_queued_are_caught(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "CudaCopyEngine", DoneWhenQueued)
    assert found(gpu)[1]


def test_events_on_a_stream_that_the_engine_has_left_are_caught(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "follow", lambda self: None)
    assert found(gpu)[0] == {"slot"}
