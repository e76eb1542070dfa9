"""The worker's half: vLLM's calls around one forward pass, in the order of the core's.

    vLLM                                            core
    handle_preemptions(metadata), every step        fence: blocks of this step may be written afterwards
    start_load_kv, before or after the forward      start_load
    wait_for_layer_load, per layer                  wait_load: whole cells arrive at once, so the first layer waits
    wait_for_save, every step                       wait_load once more (a pass without layers), then wait_save
    get_transfer_results, then load errors          finished and load_errors, read at one moment

Most steps move nothing. `enter` tells, on the engine's own thread, whether the hooks of a step have anything to do: the
step's plan is empty, and when we were last asked nothing was under way and everything had been reported. Nothing can
begin without a plan, so what was so then is so still.

vLLM starts loads after the forward pass unless a request of the step loads synchronously; the core may be told then as
well, because stores begin in `wait_save`. Errors and ends are read in one go: a load that ended between the two calls
would be reported as received without its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.connectors.page_check import check_pages
from kvcore.connectors.pages import TensorPages
from kvcore.connectors.plan import StepMeta
from kvcore.connectors.registration import register
from kvcore.connectors.views import NO_LOADS, Finished, LoadTimes
from kvcore.connectors.vllm.moving import Moving
from kvcore.connectors.vllm.store_notes import Note, NotedStores
from kvcore.connectors.worker import WorkerConnector


class WorkerHalf:
    """Runs on the cache's loop; one per worker. `noted`: its client, if somebody wants to hear of its stores."""

    def __init__(self, core: WorkerConnector, noted: NotedStores | None = None) -> None:
        self._core = core
        self._noted = noted
        self._notes: tuple[Note, ...] = ()
        self._loading = False
        self._at_rest = False  # written at the end of a call, when the engine's thread waits for it
        self._errors: frozenset[int] = frozenset()
        self._loads = NO_LOADS

    async def register(self, choose: Callable[[], Moving]) -> None:
        """`choose` is called here, on the loop. Raises InternalError when bytes do not survive the way to the pages."""
        moving = choose()
        if isinstance(moving.pages, TensorPages):
            await register(self._core, moving.pages, moving.device)
        else:
            await check_pages(moving.pages, moving.device)
            self._core.register(moving.pages, moving.device)

    def enter(self, meta: StepMeta) -> bool:
        """The hooks of this step have something to do. On the engine's thread."""
        if self._at_rest and not (meta.loads or meta.stores or meta.ended):
            return False
        self._at_rest = False
        return True

    async def fence(self, meta: StepMeta) -> None:
        waiting = self._core.fence(meta)
        if waiting is not None:
            await waiting

    async def start_load(self, meta: StepMeta) -> None:
        self._core.start_load(meta)
        self._loading = any(not plan.load_async for plan in meta.loads)

    @property
    def loading(self) -> bool:
        """Some load of this step has to be waited for before a layer reads."""
        return self._loading

    async def wait_load(self) -> None:
        waiting = self._core.wait_load(0)
        if waiting is not None:
            await waiting
        self._loading = False

    async def wait_save(self) -> None:
        await self.wait_load()
        self._core.wait_save()

    async def take_reports(self, request_ids: Sequence[str]) -> Finished:
        finished = self._core.finished(request_ids)
        self._errors |= self._core.load_errors()
        self._loads += finished.loads
        if self._noted is not None:
            self._notes += self._noted.take()
        self._at_rest = self._core.reported
        return finished

    def take_loads(self) -> LoadTimes:
        """How long loads took that were reported since the last time."""
        loads, self._loads = self._loads, NO_LOADS
        return loads

    def take_notes(self) -> tuple[Note, ...]:
        notes, self._notes = self._notes, ()
        return notes

    def take_errors(self) -> frozenset[int]:
        errors, self._errors = self._errors, frozenset()
        return errors
