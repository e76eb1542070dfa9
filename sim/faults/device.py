"""Faults of the devices that move KV between the engine's pages and the cache.

    device.late_completion  the bytes are there, and the end of the batch is announced late
    device.stalled_stream   one stream stands still while the others run: what was submitted first ends last
    device.fail_copy        the n-th page does not move (nth 0: none does), and its batch ends with an error
    device.slow_store       stores read their pages slowly, so that blocks are given away that a store still reads
    device.refuse_submit    the n-th submission (nth 0: each) is refused at once, by an exception out of `submit`

Targets: a device ("device0"), one of its streams where the kind says so ("device0.store"), or "" for all devices. Each
fault is a rule of the world's `DeviceRules`, by the device's name: it also meets the device of a worker that has
started again. All of this a device may do; a failed or refused copy is a cell that is not stored, or a load that is
reported as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.ports import Copy
from kvcore.sim.faults.kind import MS, End, FaultEvent, Kind, Shape, counted, lasting, moment
from kvcore.sim.faults.scene import Scene
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.ports.device_rules import DeviceRules
from kvcore.sim.streams import RandomStream

_DOWN_NS = (MS, 20 * MS)
_UP_NS = (MS, 8 * MS)
LOAD, STORE = "load", "store"


class DeviceError(RuntimeError):
    """What a driver answers. A copy that failed has moved some of its pages, this one and later ones not."""


def _rules(scene: Scene, event: FaultEvent) -> list[DeviceRules]:
    """Of the event's device, or of every device that the world has had."""
    name = event.target.partition(".")[0]
    return [scene.world.device_rules(name)] if name else scene.world.all_device_rules


def _on_each(scene: Scene, event: FaultEvent, add: Callable[[DeviceRules], End]) -> End:
    endings = [add(rules) for rules in _rules(scene, event)]

    return _all(endings)


def _all(endings: Sequence[End]) -> End:
    def end() -> None:
        for ending in endings:
            ending()

    return end


def _is_target(event: FaultEvent, stream: str) -> bool:
    wanted = event.target.partition(".")[2]
    return wanted in ("", stream)


def _streams(shape: Shape) -> tuple[str, ...]:
    return tuple(f"{device}.{stream}" for device in shape.devices for stream in (LOAD, STORE))


def draw_late_completion(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting(
        "device.late_completion", stream, shape, (*shape.devices, *_streams(shape)),
        down_ns=_DOWN_NS, up_ns=_UP_NS, amount=(MS // 5, 8 * MS),
    )  # fmt: skip


def begin_late_completion(scene: Scene, event: FaultEvent) -> End:
    drawn = scene.stream(event)

    def delay(stream: str, last: bool) -> int:
        if not last or stream not in (LOAD, STORE) or not _is_target(event, stream):
            return 0
        scene.fired(event)
        return drawn.random_ns(1, max(1, event.amount))

    return _on_each(scene, event, lambda rules: rules.add_delay(delay))


def draw_stalled_stream(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting("device.stalled_stream", stream, shape, _streams(shape), down_ns=_DOWN_NS, up_ns=_UP_NS)


def begin_stalled_stream(scene: Scene, event: FaultEvent) -> End:
    name = event.target.partition(".")[2] or STORE
    return _on_each(scene, event, lambda rules: rules.shut(name, scene.once(event)))


def draw_fail_copy(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return counted("device.fail_copy", stream, shape, (*shape.devices, *_streams(shape), ""), nth=(1, 200))


def begin_fail_copy(scene: Scene, event: FaultEvent) -> End:
    trigger = Trigger(scene, event)

    def failure(stream: str, copy: Copy) -> BaseException | None:
        return DeviceError("the copy failed on the device") if _is_target(event, stream) and trigger.hits() else None

    return _on_each(scene, event, lambda rules: rules.add_failure(failure))


def draw_slow_store(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """From the beginning in half of the cases: a block comes back after some steps only."""
    begin_ns = stream.pick((0, moment(stream, shape)))
    end_ns = begin_ns + stream.random_ns(shape.horizon_ns // 4, 2 * shape.horizon_ns)
    amount = stream.tail_ns(MS, 10 * MS)
    return [FaultEvent("device.slow_store", begin_ns, end_ns, stream.pick((*shape.devices, "")), amount=amount)]


def begin_slow_store(scene: Scene, event: FaultEvent) -> End:
    drawn = scene.stream(event)

    def delay(stream: str, last: bool) -> int:
        return 0 if last or stream != STORE else drawn.random_ns(0, event.amount)

    def add(rules: DeviceRules) -> End:
        return _all([rules.add_delay(delay), rules.on_reuse(lambda block: scene.fired(event))])

    return _on_each(scene, event, add)


def draw_refuse_submit(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return counted("device.refuse_submit", stream, shape, (*shape.devices, *_streams(shape), ""), nth=(1, 40))


def begin_refuse_submit(scene: Scene, event: FaultEvent) -> End:
    trigger = Trigger(scene, event)

    def refusal(stream: str, copies: Sequence[Copy]) -> BaseException | None:
        return DeviceError("the device is full") if _is_target(event, stream) and trigger.hits() else None

    return _on_each(scene, event, lambda rules: rules.add_refusal(refusal))


KINDS = (
    Kind(
        "device.late_completion",
        "the end of each batch is announced up to `amount` ns late",
        draw_late_completion,
        begin_late_completion,
    ),
    Kind(
        "device.stalled_stream",
        "one stream stands still while the others run",
        draw_stalled_stream,
        begin_stalled_stream,
    ),
    Kind("device.fail_copy", "the `nth` page does not move; its batch fails", draw_fail_copy, begin_fail_copy),
    Kind(
        "device.slow_store",
        "stores take up to `amount` ns more per page; fires when a block is given away while a store reads it",
        draw_slow_store,
        begin_slow_store,
    ),
    Kind(
        "device.refuse_submit",
        "the `nth` submission raises at once",
        draw_refuse_submit,
        begin_refuse_submit,
    ),
)
