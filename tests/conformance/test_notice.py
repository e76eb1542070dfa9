"""What every `Notice` promises."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

import pytest

from kvcore.errors import CallerError
from kvcore.runtime.notice import EventfdNotice
from kvcore.sim.ports.notice import SimNotice


@pytest.fixture(params=["eventfd", "pipe", "sim-1", "sim-2", "sim-3"])
def port(request):
    return request.param


@pytest.fixture
def new_notice(port):
    def make():
        loop = asyncio.get_running_loop()
        if port.startswith("sim"):
            return SimNotice(loop)
        return EventfdNotice(loop, use_pipe=port == "pipe")

    return make


def test_a_signal_reaches_the_subscriber_after_the_call_that_gave_it(world, inbox, new_notice):
    async def scenario():
        box, notice = inbox(), new_notice()
        notice.subscribe(box.put)
        notice.signal()
        assert box.items == []
        await box.first(1)
        notice.close()

    world.run(scenario)


def test_a_signal_before_the_subscription_is_delivered_after_it(world, inbox, new_notice):
    async def scenario():
        box, notice = inbox(), new_notice()
        notice.signal()
        notice.subscribe(box.put)
        assert box.items == []
        await box.first(1)
        notice.close()

    world.run(scenario)


def test_signals_before_one_delivery_coalesce(world, inbox, new_notice):
    async def scenario():
        box, notice = inbox(), new_notice()
        notice.subscribe(box.put)
        for _ in range(1000):
            notice.signal()
        await box.first(1)
        notice.signal()
        await box.first(2)
        await _turns_of_another_notice(inbox, new_notice)
        assert len(box.items) == 2
        notice.close()

    world.run(scenario)


def test_a_signal_given_by_the_subscriber_is_delivered_again(world, inbox, new_notice):
    async def scenario():
        box, notice = inbox(), new_notice()

        def again():
            box.put()
            if len(box.items) < 5:
                notice.signal()
                assert len(box.items) < 5, "delivered inside the call"

        notice.subscribe(again)
        notice.signal()
        await box.first(5)
        notice.close()

    world.run(scenario)


def test_a_second_subscriber_takes_the_place_of_the_first(world, inbox, new_notice):
    async def scenario():
        first, second, notice = inbox(), inbox(), new_notice()
        notice.subscribe(first.put)
        notice.signal()
        notice.subscribe(second.put)
        await second.first(1)
        notice.signal()
        await second.first(2)
        assert first.items == []
        notice.close()

    world.run(scenario)


def test_a_signal_that_has_been_delivered_is_not_delivered_to_a_later_subscriber(world, inbox, new_notice):
    async def scenario():
        first, second, notice = inbox(), inbox(), new_notice()
        notice.subscribe(first.put)
        notice.signal()
        await first.first(1)
        notice.subscribe(second.put)
        await _turns_of_another_notice(inbox, new_notice)
        assert second.items == []
        notice.close()

    world.run(scenario)


def test_nothing_is_delivered_after_close(world, inbox, new_notice):
    async def scenario():
        box, notice = inbox(), new_notice()
        notice.subscribe(box.put)
        notice.signal()
        notice.close()
        await _turns_of_another_notice(inbox, new_notice)
        assert box.items == []

    world.run(scenario)


def test_a_subscriber_may_close_its_notice(world, inbox, new_notice):
    async def scenario():
        box, notice = inbox(), new_notice()

        def close():
            notice.signal()
            notice.close()
            box.put()

        notice.subscribe(close)
        notice.signal()
        await box.first(1)
        await _turns_of_another_notice(inbox, new_notice)
        assert len(box.items) == 1

    world.run(scenario)


def test_calls_on_a_closed_notice_are_the_callers_mistake_but_closing_twice_is_not(world, new_notice):
    async def scenario():
        notice = new_notice()
        notice.close()
        notice.close()
        with pytest.raises(CallerError):
            notice.signal()
        with pytest.raises(CallerError):
            notice.subscribe(lambda: None)

    world.run(scenario)


@pytest.mark.parametrize("port", ["eventfd", "pipe"], indirect=True)
def test_threads_that_signal_after_each_result_lose_none(world, inbox, new_notice):
    async def scenario():
        box, notice, results = inbox(), new_notice(), deque()

        def drain():
            while results:
                box.put(results.popleft())

        def produce(producer):
            for number in range(500):
                results.append((producer, number))
                notice.signal()

        notice.subscribe(drain)
        threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(4)]
        for thread in threads:
            thread.start()
        received = await box.first(2000)
        for producer in range(4):
            assert [number for who, number in received if who == producer] == list(range(500))
        for thread in threads:
            thread.join(timeout=60)
        notice.close()

    world.run(scenario)


async def _turns_of_another_notice(inbox, new_notice, turns=5):
    """Gives a delivery that must not come the time in which it would have come."""
    box, notice = inbox(), new_notice()
    notice.subscribe(box.put)
    for turn in range(turns):
        notice.signal()
        await box.first(turn + 1)
    notice.close()
