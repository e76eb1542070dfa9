"""What every `CopyEngine` promises."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest

from kvcore.device.cpu_engine import CpuCopyEngine
from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.errors import CallerError
from kvcore.ladder.emulated_cuda import EmulatedCuda
from kvcore.ports import Copy
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.streams import BehindFailure
from kvcore.sim.ports.copy import SimCopyEngine


@pytest.fixture(params=["threads", "cpu", "cuda-emulated-1", "cuda-emulated-2", "sim-1", "sim-2", "sim-3"])
def port(request):
    return request.param


@pytest.fixture
def new_engine(port):
    devices = []

    def make():
        loop = asyncio.get_running_loop()
        if port.startswith("sim"):
            return SimCopyEngine(loop, "device")
        if port.startswith("cuda"):
            devices.append(EmulatedCuda(int(port[-1]), _refusal))
            return ComputingCuda(loop, devices[-1])
        return ThreadCopyEngine(loop) if port == "threads" else CpuCopyEngine(loop)

    yield make
    for device in devices:
        device.close()


class ComputingCuda(CudaCopyEngine):
    """With an engine that computes on the device's compute stream. What it raises goes to the loop, as a crash."""

    def __init__(self, loop, device):
        super().__init__(loop, device)
        self.device = device

    def run_compute(self, work, after=()):
        self._check_open()
        for ticket in after:
            ticket._when_done(self.device.kick)

        def compute():
            try:
                work()
            except Exception as error:
                context = {"message": "compute work raised", "exception": error}
                self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)
                raise

        self.device.compute_on(self.device.compute, compute, lambda: all(ticket.done for ticket in after))
        return self.compute_event()


def _refusal(copy):
    return OSError("uncorrectable memory error") if isinstance(copy.source, BrokenMemory) else None


class Gate:
    """Compute work that ends when `open` is called, or, simulated, a virtual millisecond later."""

    def __init__(self, engine, work=lambda: None):
        self._opened = threading.Event()
        self._work = work
        self.open = self._opened.set
        if isinstance(engine, SimCopyEngine):
            self.event = engine.run_compute(work, 1_000_000)
        elif isinstance(engine, ComputingCuda):
            engine.device.hold(engine.device.compute)
            self.event = engine.run_compute(work)
            self.open = lambda: engine.device.release(engine.device.compute)
        else:
            self.event = engine.run_compute(self._wait_and_work)

    def _wait_and_work(self):
        assert self._opened.wait(timeout=60)
        self._work()


class BrokenMemory(np.ndarray):
    """Memory whose bytes cannot be read."""

    def __array_function__(self, func, types, args, kwargs):
        raise OSError("uncorrectable memory error")


def broken(nbytes):
    return np.zeros(nbytes, np.uint8).view(BrokenMemory)


def test_bytes_arrive_between_every_kind_of_buffer(world, new_engine):
    pages = np.arange(4 * 3 * 8, dtype=np.uint64).reshape(4, 3, 8)

    async def scenario():
        engine = new_engine()
        flat = bytearray(3 * 8 * 8)
        strided = np.zeros((3, 4, 8), np.uint64)
        other = np.zeros((6, 4), np.uint64)
        odd = memoryview(bytearray(3 * 8 * 8 + 1))[1:]
        await done(
            engine.submit(
                [
                    Copy(pages[1], memoryview(flat)),
                    Copy(pages[2], strided[:, 1]),
                    Copy(pages[3], other),
                    Copy(pages[:3, 0], odd),
                ],
                stream="store",
            )
        )
        assert bytes(flat) == pages[1].tobytes()
        assert np.array_equal(strided[:, 1], pages[2])
        assert not strided[:, [0, 2, 3]].any()
        assert np.array_equal(other.reshape(3, 8), pages[3])
        assert bytes(odd) == pages[:3, 0].tobytes()
        back = np.zeros((3, 4, 8), np.uint64)
        await done(engine.submit([Copy(memoryview(flat), back[:, 3])], stream="load"))
        assert np.array_equal(back[:, 3], pages[1])
        engine.close()

    world.run(scenario)


@pytest.mark.parametrize(
    "copy",
    [
        Copy(bytearray(8), bytearray(9)),
        Copy(bytearray(8), b"12345678"),
        Copy(bytearray(8), memoryview(bytearray(16))[::2]),
        Copy(np.zeros((4, 4))[:, :2], np.zeros((8, 2))[::2].T),
        Copy(None, bytearray(8)),
    ],
    ids=["size", "read-only", "strided-view", "both-strided", "no-buffer"],
)
def test_buffers_that_cannot_be_copied_are_the_callers_mistake(world, new_engine, copy):
    async def scenario():
        engine = new_engine()
        with pytest.raises(CallerError):
            engine.submit([copy], stream="store")
        await done(engine.submit([], stream="store"))
        engine.close()

    world.run(scenario)


def test_a_stream_ends_its_batches_in_order(world, inbox, new_engine):
    async def scenario():
        box, engine = inbox(), new_engine()
        for number in range(30):
            copies = [Copy(bytearray(64), bytearray(64)) for _ in range(number * 7 % 5)]
            ticket = engine.submit(copies, stream="store")
            ticket.on_done(lambda number=number: box.put(number))
        assert await box.first(30) == list(range(30))
        engine.close()

    world.run(scenario)


def test_a_later_batch_of_a_stream_sees_the_bytes_of_an_earlier_one(world, new_engine):
    async def scenario():
        engine = new_engine()
        cells = [np.full(32, number, np.uint8) for number in range(10)]
        for source, target in itertools.pairwise(cells):
            ticket = engine.submit([Copy(source, target)], stream="shift")
        await done(ticket)
        assert all(not cell.any() for cell in cells)
        engine.close()

    world.run(scenario)


def test_a_batch_begins_after_the_events_it_waits_for(world, new_engine):
    async def scenario():
        engine = new_engine()
        source, target = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
        gate = Gate(engine, lambda: source.fill(7))
        event = engine.compute_event()
        assert not event.done
        ticket = engine.submit([Copy(source, target)], stream="store", after=[event])
        free = engine.submit([Copy(bytearray(8), bytearray(8))], stream="load")
        await done(free)  # another stream is not held up
        assert not ticket.done
        assert not target.any()
        gate.open()
        await done(ticket)
        assert event.done
        assert (target == 7).all()
        engine.close()

    world.run(scenario)


def test_tickets_are_events_too(world, new_engine):
    async def scenario():
        engine = new_engine()
        a, b, c = np.full(8, 1, np.uint8), np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        gate = Gate(engine)
        first = engine.submit([Copy(a, b)], stream="one", after=[gate.event])
        second = engine.submit([Copy(b, c)], stream="two", after=[first, first])
        gate.open()
        await done(second)
        assert first.done
        assert (c == 1).all()
        engine.close()

    world.run(scenario)


def test_an_idle_compute_stream_has_nothing_to_wait_for(world, new_engine):
    async def scenario():
        engine = new_engine()
        assert engine.compute_event().done
        await engine.compute_event().wait()
        event = engine.run_compute(lambda: None)
        await event.wait()
        assert event.done
        assert engine.compute_event().done
        engine.close()

    world.run(scenario)


def test_compute_work_runs_in_order_after_its_events(world, new_engine):
    async def scenario():
        engine, ran = new_engine(), []
        source, target = np.full(8, 3, np.uint8), np.zeros(8, np.uint8)
        load = engine.submit([Copy(source, target)], stream="load")
        engine.run_compute(lambda: ran.append(int(target[0])), after=[load])
        for number in range(10):
            engine.run_compute(lambda number=number: ran.append(number))
        await engine.compute_event().wait()
        assert ran == [3, *range(10)]
        engine.close()

    world.run(scenario)


def test_compute_work_that_raises_is_reported_and_ends(world, inbox, new_engine):
    async def scenario():
        engine = new_engine()

        def fail():
            raise LookupError("forward pass")

        failed = engine.run_compute(fail)
        await failed.wait()
        following = engine.run_compute(lambda: None)
        await following.wait()
        assert failed.done
        engine.close()

    world.run(scenario)
    (error,) = world.loop_errors
    assert isinstance(error, LookupError)
    world.loop_errors.clear()


def test_nothing_moves_behind_compute_work_that_failed(world, new_engine):
    """Else the pages of a forward pass that broke off are stored as if they were good."""

    async def scenario():
        engine, ran = new_engine(), []
        source, target = np.full(16, 9, np.uint8), np.zeros(16, np.uint8)

        def fail():
            raise LookupError("an all-reduce without its peer")

        engine.run_compute(fail)
        following = engine.run_compute(lambda: ran.append("next layer"))
        store = engine.submit([Copy(source, target)], stream="store", after=[engine.compute_event()])
        free = engine.submit([Copy(source, target[:])], stream="load")
        await following.wait()
        await store.wait()
        assert isinstance(store.error, BehindFailure)
        assert ran == []
        await free.wait()
        assert free.error is None, "what waits for nothing is not concerned"
        engine.close()

    world.run(scenario)
    (error,) = world.loop_errors
    assert isinstance(error, LookupError)
    world.loop_errors.clear()


def test_a_batch_cancelled_before_it_began_never_touches_memory(world, inbox, new_engine):
    async def scenario():
        box, engine = inbox(), new_engine()
        source, target = np.full(16, 9, np.uint8), np.zeros(16, np.uint8)
        gate = Gate(engine)
        ticket = engine.submit([Copy(source, target)], stream="store", after=[gate.event])
        ticket.on_done(box.put)
        behind = engine.submit([Copy(source.copy(), target.copy())], stream="store")
        assert ticket.error is None
        assert ticket.cancel() is True
        assert ticket.done
        assert ticket.error is not None
        assert box.items == [], "delivered inside the call"
        await ticket.wait()
        await box.first(1)
        await done(behind)  # although the event has not happened yet
        assert not gate.event.done
        gate.open()
        await gate.event.wait()
        await done(engine.submit([Copy(source.copy(), target.copy())], stream="store"))
        assert not target.any()
        assert ticket.cancel() is False
        engine.close()

    world.run(scenario)


def test_cancel_of_what_has_ended_changes_nothing(world, new_engine):
    async def scenario():
        engine = new_engine()
        ticket = engine.submit([Copy(bytearray(b"12345678"), bytearray(8))], stream="store")
        await done(ticket)
        assert ticket.cancel() is False
        assert ticket.error is None
        engine.close()

    world.run(scenario)


def test_exactly_one_of_cancel_and_begin_wins(world, new_engine):
    async def scenario():
        engine, source = new_engine(), np.full(64, 5, np.uint8)
        targets = [np.zeros(64, np.uint8) for _ in range(200)]
        tickets = [engine.submit([Copy(source, target)], stream="store") for target in targets]
        await tickets[100].wait()
        cancelled = [ticket.cancel() for ticket in tickets]
        for ticket in tickets:
            await ticket.wait()
        assert not any(cancelled[:101])
        for ticket, target, was_cancelled in zip(tickets, targets, cancelled, strict=True):
            assert target.any() != was_cancelled
            assert (ticket.error is not None) == was_cancelled
        engine.close()

    world.run(scenario)


def test_a_copy_that_fails_ends_its_batch_and_no_other(world, new_engine):
    async def scenario():
        engine = new_engine()
        first, last, other = bytearray(4), bytearray(4), bytearray(4)
        failing = engine.submit(
            [Copy(b"good", first), Copy(broken(4), bytearray(4)), Copy(b"good", last)], stream="store"
        )
        following = engine.submit([Copy(b"good", other)], stream="store")
        await failing.wait()
        assert isinstance(failing.error, OSError)
        assert bytes(first) == b"good"
        assert bytes(last) == b"\0\0\0\0"
        await done(following)
        assert bytes(other) == b"good"
        engine.close()

    world.run(scenario)


def test_callbacks_come_in_the_order_of_registration_also_when_late(world, inbox, new_engine):
    async def scenario():
        box, engine = inbox(), new_engine()
        ticket = engine.submit([Copy(b"12345678", bytearray(8))], stream="store")
        for number in range(5):
            ticket.on_done(lambda number=number: box.put(number))
        await ticket.wait()
        for number in range(5, 10):
            ticket.on_done(lambda number=number: box.put(number))
        assert len(box.items) <= 5, "delivered inside the call"
        assert await box.first(10) == list(range(10))
        engine.close()

    world.run(scenario)


def test_many_may_wait_and_giving_up_a_wait_disturbs_nobody(world, inbox, new_engine):
    async def scenario():
        engine, box = new_engine(), inbox()
        target = bytearray(8)
        gate = Gate(engine)
        ticket = engine.submit([Copy(b"12345678", target)], stream="store", after=[gate.event])

        async def wait(number):
            await ticket.wait()
            box.put(number)

        waiters = [asyncio.create_task(wait(number)) for number in range(5)]
        started = asyncio.create_task(free_copy(engine))
        await started
        waiters[2].cancel()
        gate.open()
        assert sorted(await box.first(4)) == [0, 1, 3, 4]
        assert bytes(target) == b"12345678"
        assert (await asyncio.gather(waiters[2], return_exceptions=True))[0].__class__ is asyncio.CancelledError
        engine.close()

    world.run(scenario)


def test_close_cancels_what_has_not_begun_and_delivers_nothing_more(world, inbox, new_engine):
    async def scenario():
        box, engine, target = inbox(), new_engine(), bytearray(8)
        gate = Gate(engine)
        finished = engine.submit([Copy(b"12345678", bytearray(8))], stream="load")
        await done(finished)
        waiting = engine.submit([Copy(b"12345678", target)], stream="store", after=[gate.event])
        waiting.on_done(box.put)
        engine.close()
        engine.close()
        assert waiting.done
        assert waiting.error is not None
        gate.open()
        other = new_engine()
        for _ in range(5):
            await done(other.submit([Copy(b"12345678", bytearray(8))], stream="store"))
        other.close()
        assert box.items == []
        assert bytes(target) == bytes(8)
        for call in (
            engine.compute_event,
            lambda: engine.submit([], stream="store"),
            lambda: engine.run_compute(lambda: None),
        ):
            with pytest.raises(CallerError):
                call()

    world.run(scenario)


def test_events_of_another_device_are_refused(world, new_engine):
    class Foreign:
        done = True

    async def scenario():
        engine = new_engine()
        with pytest.raises(CallerError):
            engine.submit([], stream="store", after=[Foreign()])
        engine.close()

    world.run(scenario)


async def done(ticket):
    """Wait for a batch that must succeed."""
    await ticket.wait()
    assert ticket.done
    assert ticket.error is None


async def free_copy(engine):
    await done(engine.submit([Copy(b"12345678", bytearray(8))], stream="load"))
