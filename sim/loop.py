"""SimLoop: an asyncio event loop on a SimPy clock, in which every tie is broken by the seed.

Theory of operation
-------------------
Production code runs on it unchanged. Time is an integer number of nanoseconds and moves only when nothing is left to
do at the present instant.

    *ready*    entries (`SimHandle`) that may run now, in order of arrival.
    *timers*   instant -> entries that become ready then (`Timers`). SimPy's queue orders time, and the loop orders
               what happens at one time.

One step of the pump:

    1.  SimPy events that are due at this very instant are processed first. A timer that is due now so joins the same
        pick as what is ready already.
    2.  If nothing is ready, the next SimPy event is processed, which moves time; without one, nobody can ever run
        again: `DeadlockError` says who waits for what.
    3.  Else the tie policy picks one of the ready entries (uniformly, unless told otherwise) and takes it out.
    4.  An entry whose process is stopped is put aside. If the entry belongs to a FIFO (callbacks of one future, a
        channel), the FIFO makes its next one ready.
    5.  A cancelled entry, and one whose process is dead, is dropped. Any other goes into the trace and runs.

asyncio promises that `call_soon` is first in, first out. Here it is not, on purpose. The promise is kept for the
callbacks of ONE future: `call_soon` with a finished future as its only argument is how futures announce themselves.

An exception in a callback, in an oracle, in a task that nobody awaits, and a call over the fence end the run: `fail`
keeps the first one and `run_until_complete` raises it. Nothing is only printed.

Garbage collection is off while the loop steps and runs at the beginning and the end, so finalizers never run at
points that depend on the history of the interpreter. The running-loop mark of asyncio is saved and restored, so a
simulation can be run inside another one's callback.

Rejected: asyncio.BaseEventLoop (its ready queue is FIFO and private), one SimPy event per callback (three times
slower, and SimPy's heap would decide ties by random keys, which starves), swap-and-pop (loses the order of arrival,
which the shrinker needs; a list removes from the middle as fast).

The loop holds its processes, the tasks of dead ones until `close`, its streams and its trace (which outlives it).
`close` ends the world: every coroutine that still waits is disposed of quietly, its process marked dead.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from itertools import chain, count
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple

from kvcore.errors import CallerError
from kvcore.sim.channel import Channel, FutureOrder
from kvcore.sim.deadlock import DeadlockError, report
from kvcore.sim.endings import dispose, garbage_collected_at_the_ends, running_mark
from kvcore.sim.environment import SimEnvironment
from kvcore.sim.fence import Fence
from kvcore.sim.livelock import LivelockError, Standstill
from kvcore.sim.outside import NoOutsideLoop, refuse
from kvcore.sim.process import CURRENT, Incarnation, SimProcess
from kvcore.sim.schedule import TiePolicy, layered, make_policy
from kvcore.sim.streams import Streams
from kvcore.sim.tasks import SimFuture, SimHandle, SimTask
from kvcore.sim.timers import Timers
from kvcore.sim.trace import Trace

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

NS_PER_SECOND = 1_000_000_000
_NEVER = float("inf")
_HOUSEKEEPING_MASK = 0xFFF  # every 4,096 callbacks

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class SimLoop(NoOutsideLoop):
    """See the module's text. `schedule` is "random", "fifo", "priority", or a tie policy of one's own."""

    def __init__(
        self,
        seed: int,
        *,
        schedule: str | TiePolicy = "random",
        trace: Trace | None = None,
        change_points: int = 0,
        start_ns: int = 0,
        fenced: bool = True,
    ) -> None:
        self.streams = Streams(seed)
        self.trace = Trace() if trace is None else trace
        self.callbacks_run = 0
        self.explanations: list[Callable[[], Iterable[str]]] = []  # more lines for the reports of who waits for what
        chosen = schedule
        if isinstance(chosen, str):
            chosen = make_policy(chosen, self.streams["schedule"], change_points)
        self.policy, self.layers = layered(chosen)
        self.timer_rules: list[Callable[[SimHandle], None]] = []  # each may move a timer of asyncio's when it is set
        ties = None if schedule == "fifo" else self.streams["schedule.simpy"]
        self.env = SimEnvironment(start_ns, ties)
        self.trace.now_ns = self.now_ns
        self.trace.on_error = self.fail
        self._fenced = fenced
        self._ready: list[SimHandle] = []
        self.timers = Timers(self.env, self._ready.append)
        self._future_order = FutureOrder(self._ready.append)
        self._handle_numbers = count(1)
        self._future_numbers = count(1)
        self._processes: dict[str, SimProcess] = {}
        self._buried: list[SimTask[Any]] = []
        self._waiting: list[SimTask[Any]] = []
        self._failure: BaseException | None = None
        self._exception_handler: ExceptionHandler | None = None
        self._main: asyncio.Future[Any] | None = None
        self._thread_id: int | None = None
        self._stopping = False
        self._closed = False
        self._disposing = False
        self._has_failed = False
        self._standstill = Standstill(start_ns)

    # Time

    def now_ns(self) -> int:
        return self.env.now  # type: ignore[return-value]  # SimEnvironment accepts integers only

    def time(self) -> float:
        """Seconds; rounding the product with 10**9 gives back the exact nanoseconds (up to 50 days)."""
        return self.env.now / NS_PER_SECOND

    # Entries

    def make_handle(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, when_ns: int
    ) -> SimHandle:
        """An entry that is not yet ready. For channels."""
        if context is None:
            context = copy_context()
        return SimHandle(callback, args, context, next(self._handle_numbers), when_ns)

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> SimHandle:
        if context is None:
            context = copy_context()
        given: tuple[Any, ...] = args
        handle = SimHandle(callback, given, context, next(self._handle_numbers), self.env.now)  # type: ignore[arg-type]
        if self._closed:
            self._refuse_closed(handle)
        elif len(given) == 1 and isinstance(given[0], asyncio.Future) and given[0].done():
            self._future_order.add(handle, given[0])
        else:
            self._ready.append(handle)
        return handle

    def _refuse_closed(self, handle: SimHandle) -> None:
        handle.cancel()
        if not self._disposing:
            raise RuntimeError("Event loop is closed")

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        if self._thread_id is not None and self._thread_id != threading.get_ident():
            refuse("other threads", "let the Executor port deliver the outcome")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        return self._timer(self.now_ns() + round(delay * NS_PER_SECOND), callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        return self._timer(round(when * NS_PER_SECOND), callback, args, context)

    def _timer(
        self, when_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> SimHandle:
        """A timer of asyncio's goes by the clock of its process; those in nanoseconds are the world's own."""
        handle = self.make_handle(callback, args, context, when_ns)
        handle.is_timer = True
        if self._closed:
            self._refuse_closed(handle)
            return handle
        for rule in self.timer_rules:
            rule(handle)
        self.timers.arm(handle)
        return handle

    def call_later_ns(
        self, delay_ns: int, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self.call_at_ns(self.now_ns() + delay_ns, callback, *args, context=context)

    def call_at_ns(
        self, when_ns: int, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        """Run `callback` at `when_ns`, or now if that is past."""
        handle = self.make_handle(callback, args, context, when_ns)
        if self._closed:
            self._refuse_closed(handle)
        else:
            self.timers.arm(handle)
        return handle

    def after_callback(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function` when the callback that is running has ended, before anything else runs."""

        def ended(event: Any) -> None:
            function(*args)

        event = self.env.timeout(0)
        assert event.callbacks is not None
        event.callbacks.append(ended)

    # Futures, tasks, processes, channels

    def create_future(self) -> SimFuture[Any]:
        future: SimFuture[Any] = SimFuture(loop=self)
        future.sequence = next(self._future_numbers)
        future.incarnation = CURRENT.get()
        future.label = ""
        return future

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **options: Any,
    ) -> SimTask[T]:
        if options.get("eager_start"):
            refuse("eager tasks", "let the task begin at a tie of its own")
        if self._closed:
            coro.close()
            raise RuntimeError("Event loop is closed")
        if context is None:
            context = copy_context()
        number, incarnation = next(self._future_numbers), context.get(CURRENT)
        return SimTask(coro, self, name, context, number, incarnation)  # type: ignore[arg-type]

    def process(self, name: str) -> SimProcess:
        """Start a simulated process. Names are unique in a run."""
        if name in self._processes:
            raise CallerError(f"there is a process {name!r} already; restart() begins its next life")
        process = self._processes[name] = SimProcess(self, name)
        return process

    def current_process(self) -> SimProcess | None:
        """The process whose code is running."""
        incarnation = CURRENT.get()
        return None if incarnation is None else incarnation.process

    def bury(self, incarnation: Incarnation) -> None:
        """Mark dead and keep every pending task of that life referenced. For `SimProcess.crash`."""
        incarnation.alive = False
        self._buried.extend(task for task in self._pending() if task.incarnation is incarnation)

    def put_back(self, handles: Sequence[SimHandle]) -> None:
        """Entries that were taken out and not run are ready again. For `SimProcess.resume`."""
        self._ready.extend(handles)

    def channel(self, label: str) -> Channel:
        """A queue of deliveries that keeps its order."""
        return Channel(self, label)

    def _pending(self) -> list[SimTask[Any]]:
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask)]
        tasks.sort(key=lambda task: task.sequence)
        return tasks

    # Running

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        self._check_open()
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        main.add_done_callback(self._main_done)
        self._main = main
        try:
            self._step_fenced()
        except BaseException:
            if main.done() and not main.cancelled():
                main.exception()  # something worse is being raised; this one counts as read
            raise
        finally:
            main.remove_done_callback(self._main_done)
            self._main = None
        if not main.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        self._has_failed = self._has_failed or main.cancelled() or main.exception() is not None
        return main.result()

    def _main_done(self, future: asyncio.Future[Any]) -> None:
        self._stopping = True

    def run_forever(self) -> None:
        """Run until `stop`; a deadlock is an error."""
        self._step_fenced()

    def run_until_idle(self) -> None:
        """Run until nothing is left to run, now or later. Tasks may still wait."""
        self._step_fenced(until_idle=True)

    def stop(self) -> None:
        self._stopping = True

    def fail(self, error: BaseException) -> None:
        """End the run with `error` after the callback that is running. The first failure counts."""
        if self._failure is None:
            self._failure = error
        self._has_failed = True
        self._stopping = True

    def fence(self) -> Fence:
        """The fence of this loop, which it is behind while it steps."""
        return Fence(self.fail)

    def _step_fenced(self, until_idle: bool = False) -> None:
        self._check_open()
        if self._thread_id is not None:
            raise RuntimeError("This event loop is already running")
        with ExitStack() as stack:
            stack.enter_context(garbage_collected_at_the_ends())
            stack.enter_context(self._running())
            if self._fenced:
                stack.enter_context(self.fence())
            try:
                self._pump(until_idle)
            finally:
                self._waiting = self._pending()  # asyncio holds them weakly, and garbage is collected next
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @contextmanager
    def _running(self) -> Generator[None, None, None]:
        self._thread_id = threading.get_ident()
        try:
            with running_mark(self, self._generator_dropped):
                yield
        finally:
            self._stopping = False
            self._thread_id = None
            self.trace.flush_picks()

    def _pump(self, until_idle: bool) -> None:
        env, ready, policy, current = self.env, self._ready, self.policy, CURRENT
        peek, step, picks = env.peek, env.step, self.trace.picks
        now = env.now
        picks.append(~now)  # type: ignore[operator]
        while not self._stopping:
            if peek() <= now:
                step()
                continue
            if not ready:
                if peek() == _NEVER:
                    if not until_idle:
                        self._deadlock()
                    return
                step()
                now = env.now
                picks.append(~now)  # type: ignore[operator]
                continue
            handle = ready.pop(policy.choose(ready) if len(ready) > 1 else 0)
            incarnation = handle._context.get(current)
            if incarnation is not None and incarnation.gate is not None and incarnation.gate(handle):
                continue
            if handle.fifo is not None:
                handle.fifo.taken(handle)
            callback = handle._callback
            if callback is None:
                continue
            if incarnation is not None and not incarnation.alive:
                continue
            picks.append(handle.sequence)
            self.callbacks_run += 1
            if not self.callbacks_run & _HOUSEKEEPING_MASK:
                self._housekeeping()
            if self.trace.keep_picks:
                self.trace.event("pick", handle.sequence, handle.describe())
            try:
                handle._context.run(callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._callback_failed(handle, error)

    def _housekeeping(self) -> None:
        self.trace.flush_picks()
        if self._standstill.lasts(self.now_ns(), self.callbacks_run):
            self.fail(LivelockError(self.waits(f"callbacks run on and on at {self.now_ns()} ns: time stands still")))

    def _deadlock(self) -> None:
        name = self._main.get_name() if isinstance(self._main, asyncio.Task) else "no main task"
        header = f"deadlock at {self.now_ns()} ns: nothing is left to run while {name} waits"
        self.fail(DeadlockError(self.waits(header)))

    @property
    def nothing_left(self) -> bool:
        """Nothing is left to run, now or later. Looks at every timer."""
        return all(handle.cancelled() for handle in chain(self._ready, self.timers))

    def waits(self, header: str) -> str:
        """Who waits for what now: all pending tasks, and what the explanations add."""
        return report(self._pending(), header, [line for explain in self.explanations for line in explain()])

    # Failures

    def _callback_failed(self, handle: SimHandle, error: BaseException) -> None:
        message = f"Exception in callback {handle.describe()}"
        self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Called by asyncio when nobody else can be told. Ends the run, unless a handler was set."""
        if self._disposing or self._is_of_the_dead(context):
            return
        if self._exception_handler is not None:
            self._exception_handler(self, context)
            return
        error = context.get("exception") or RuntimeError(str(context.get("message")))
        if self._closed:
            if not self._has_failed:
                raise error  # too late to fail the run; the interpreter reports it as unraisable
            return
        if isinstance(error, Exception) and not getattr(error, "__notes__", None):
            error.add_note(str(context.get("message")))
        self.fail(error)

    def _is_of_the_dead(self, context: dict[str, Any]) -> bool:
        owner = context.get("task") or context.get("future")
        if owner is None:
            return False
        if not isinstance(owner, SimFuture | SimTask):
            return bool(self._buried)  # a gather: its process is not known
        return owner.incarnation is not None and not owner.incarnation.alive

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.fail(context.get("exception") or RuntimeError(str(context.get("message"))))

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._exception_handler

    # Async generators

    def _generator_dropped(self, generator: Any) -> None:
        """A suspended asynchronous generator lost its last reference: close it, unless its process is dead."""
        incarnation = CURRENT.get()
        if self._closed or (incarnation is not None and not incarnation.alive):
            return
        self.create_task(generator.aclose(), name="close async generator")

    # State

    def is_running(self) -> bool:
        return self._thread_id is not None

    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def close(self) -> None:
        """End the world. Disposes quietly of all that still waits; may be called twice."""
        if self._thread_id is not None:
            raise RuntimeError("Cannot close a running event loop")
        if self._closed:
            return
        self._closed = True
        self.trace.mute()
        self._disposing = True
        for process in self._processes.values():
            process.life.alive = False
        for task in self._pending():
            dispose(task)
        self._buried.clear()
        self._waiting.clear()
        self._ready.clear()
        self.timers.clear()
        self._future_order.clear()
        self._disposing = False

    def __enter__(self) -> SimLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            warnings.warn(f"unclosed event loop {self!r}", ResourceWarning, stacklevel=2, source=self)
