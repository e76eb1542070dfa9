"""A worker process: one rank's shard of the model, its pages, and the worker side of the connector.

    python -m kvcore.ladder.targets.torch.worker RANK SETUP-AS-JSON

It carries out steps in the order of the simulated engine's worker (`kvcore.sim.engine.worker`): fence, poison what a
load will write, start loads, then layer by layer, then stores, and reports. The forward pass runs on the device's
compute thread; ranks add up their partial outputs with gloo, inside that thread, as a GPU would on its stream.

Every request that was admitted with tokens it did not compute is checked against the dense reference before anything
attends to them: byte for byte, all that its next token can see. This is the torch target's oracle of bytes.

Who holds: the process its pages, copies and connections, until it is told to end (SIGTERM) or dies.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed

from kvcore.connectors.registration import register
from kvcore.connectors.views import Finished
from kvcore.connectors.worker import WorkerConnector
from kvcore.device.cpu_engine import CpuCopyEngine
from kvcore.device.movers import cpu_mover
from kvcore.groups import CacheLayout, GroupKind
from kvcore.ladder.targets.torch.dense import DenseReference
from kvcore.ladder.targets.torch.messages import EngineSetup, Report, Step, pack, read_step
from kvcore.ladder.targets.torch.model import TorchModel, build_torch_model
from kvcore.ladder.targets.torch.pages import Entry, TorchForward, TorchPages, promised_fingerprints
from kvcore.ladder.targets.torch.serving import Tell, serve_until_told
from kvcore.ladder.targets.torch.wiring import namespace_of, remote_config
from kvcore.ports import DeviceEvent
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.service.remote import ServerLink
from kvcore.sim.model import Layer

_FINDINGS_MAX = 10
_REDUCE_TIMEOUT_S = 60


class FailingStream:
    """The device's compute stream. What raises fails the stream and all that waits for it, and comes back to `finish`.

    The simulated engine's stream hides a failure from its device: a store behind a broken all-reduce would then copy
    pages that were never computed, and publish them.
    """

    def __init__(self, device: ThreadCopyEngine) -> None:
        self._device = device
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None], duration_ns: int = 0) -> DeviceEvent:
        def noting() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                raise

        return self._device.run_compute(noting, duration_ns)

    async def finish(self, event: DeviceEvent) -> None:
        await event.wait()
        if self._error is not None:
            raise self._error


class WorkerProcess:
    """See the module text."""

    def __init__(self, rank: int, setup: EngineSetup, layout: CacheLayout, model: TorchModel) -> None:
        loop = asyncio.get_running_loop()
        self._rank = rank
        self._layout = layout
        self._model = model
        by_server = setup.transfer == "server"
        self._pages = TorchPages(layout, model, setup.num_blocks, shared=by_server)
        self._reference = DenseReference(model)
        self._device = CpuCopyEngine(loop, cpu_mover(threads=1), f"device{rank}")
        self._stream = FailingStream(self._device)
        self._link = ServerLink(loop, remote_config(setup), namespace_of(setup, layout, model), layout)
        share = self._pages.describe if by_server else None
        self._side = WorkerConnector(layout, rank, self._link.worker(rank), share=share, clock=SystemClock())
        self._counts: Counter[str] = Counter()
        self._suspects: list[tuple[frozenset[int], str]] = []  # of this step: what was wrong, in which blocks

    async def register(self) -> None:
        """Before the first step. Raises for pages that are not what the keys were named for."""
        promised = promised_fingerprints(self._layout, self._model)
        await register(self._side, self._pages.paged(), self._device, promised)

    async def run(self, step: Step) -> Report:
        """Carry out one step; an exception becomes the report's error, after which nothing may be expected of us."""
        try:
            sampled, finished, errors = await self._run(step)
        except Exception:
            return self._report(step, {}, Finished(), frozenset(), traceback.format_exc())
        return self._report(step, sampled, finished, errors, "")

    async def _run(self, step: Step) -> tuple[dict[str, int], Finished, frozenset[int]]:
        await self._fence_and_load(step)
        forward = await self._forward(step)
        if step.meta is not None:
            self._side.wait_save()
        await self._stream.finish(self._device.run_compute(_nothing))  # everything submitted has run
        sampled = forward.sample() if forward is not None else {}
        if step.meta is None:
            return sampled, Finished(), frozenset()
        return sampled, self._side.finished(step.finished), self._side.load_errors()

    async def _fence_and_load(self, step: Step) -> None:
        if step.meta is not None:
            await _maybe(self._side.fence(step.meta))
        await self._compute(lambda: self._pages.poison(step.loading) if step.loading else None)
        if step.meta is not None:
            self._side.start_load(step.meta)
        await self._compute(lambda: self._prepare(step))

    def _prepare(self, step: Step) -> None:
        if step.fresh:
            self._pages.poison(step.fresh)
        for source, target in step.copies:
            self._pages.copy_block(source, target)

    async def _forward(self, step: Step) -> TorchForward | None:
        if not step.entries:
            return None
        if step.meta is not None:
            await _maybe(self._side.wait_load(0))
        await self._compute(lambda: self._check(step.entries))
        forward = TorchForward(step.entries, self._layout, self._model, self._pages, self._rank, self._reduce)
        for layer in range(len(self._model.layers)):
            if step.meta is not None:
                await _maybe(self._side.wait_load(layer))
            self._stream.submit(lambda layer=layer: forward.layer(layer), 0)  # type: ignore[misc]
            if step.meta is not None:
                self._side.save(layer)
        return forward

    async def _compute(self, work: Callable[[], None]) -> None:
        await self._stream.finish(self._stream.submit(work, 0))

    def _reduce(self, output: torch.Tensor) -> None:
        if self._model.ranks > 1:
            torch.distributed.all_reduce(output)

    # -- the oracle of bytes, on the compute thread

    def _check(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if entry.context:
                for layer in self._model.layers:
                    self._check_layer(entry, layer)
                chunk = self._layout.chunk_tokens
                self._counts["loads_verified"] += entry.loaded_tokens // chunk * len(self._layout.groups)

    def _check_layer(self, entry: Entry, layer: Layer) -> None:
        expected = self._reference.written((*entry.context, *entry.tokens), layer.index, self._rank)
        table, block_tokens = entry.tables[layer.group], self._layout.groups[layer.group].block_tokens
        end = entry.computed
        if layer.kind is GroupKind.RECURRENT:
            found = self._pages.layer(layer)[table[(end - 1) // block_tokens], 0]
            right = expected[end - 1]
        else:
            first = max(0, end - layer.window_tokens + 1) if layer.window_tokens else 0
            start = first // block_tokens
            blocks = list(table[start : -(-end // block_tokens)])
            context = self._pages.layer(layer)[blocks].reshape(-1, expected.shape[1])
            found = context[first - start * block_tokens : end - start * block_tokens]
            right = expected[first:end]
        self._counts["cells_byte_checked"] += 1
        if not torch.equal(found, right) and len(self._suspects) < _FINDINGS_MAX:
            wrong = int((found != right).reshape(-1, expected.shape[1]).any(1).nonzero()[0])
            text = (
                f"[bytes] rank {self._rank}, layer {layer.index}: the KV of {entry.request_id} differs from the "
                f"reference at position {wrong} of what it can see ({entry.loaded_tokens} of {end} tokens were loaded)"
            )
            self._suspects.append((frozenset(table), text))

    # -- the report

    def _report(
        self, step: Step, sampled: dict[str, int], finished: Finished, errors: frozenset[int], error: str
    ) -> Report:
        state = self._side.statistics()
        counts = dict(self._counts)
        counts |= {"fences_waited": state.fences_waited, "stores_cancelled": state.stores_cancelled}
        counts |= {"stores_verified": state.cells_stored, "stores_inflight": state.jobs_inflight}
        # What a failed load has left is reported with its blocks, and computed again; it is no finding.
        findings = tuple(text for blocks, text in self._suspects if blocks.isdisjoint(errors))
        self._suspects = []
        for text in findings:  # the engine may die with the report
            print(text, file=sys.stderr, flush=True)
        return Report(
            step.number,
            sampled,
            tuple(sorted(finished.sent)),
            tuple(sorted(finished.received)),
            tuple(sorted(finished.failed)),
            tuple(sorted(errors)),
            counts,
            findings,
            error,
            finished.loads,
        )

    def close(self) -> None:
        self._link.close()
        self._device.close()
        self._pages.close()


def _nothing() -> None:
    return None


async def _maybe(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result


async def _serve(rank: int, setup: EngineSetup) -> None:
    layout, model = build_torch_model(setup.model, setup.ranks, chunk_tokens=setup.chunk_tokens, seed=setup.seed)
    worker = WorkerProcess(rank, setup, layout, model)
    await worker.register()

    async def work(tell: Tell, payload: bytes) -> None:
        tell(pack(await worker.run(read_step(payload))))

    await serve_until_told(setup.socket(f"worker{rank}"), work, worker.close)


def main() -> None:
    rank, setup = int(sys.argv[1]), EngineSetup.from_text(sys.argv[2])
    torch.set_num_threads(1)
    if setup.ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{setup.directory}/ranks",
            rank=rank,
            world_size=setup.ranks,
            timeout=timedelta(seconds=_REDUCE_TIMEOUT_S),
        )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(rank, setup))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
