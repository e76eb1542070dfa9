"""`DeviceRules`: what goes wrong on one simulated device.

A copy engine belongs to a process and ends with it; the rules are the world's, by the device's name, and hold for
whatever engine has that name. A copy engine asks

    refusal(stream, copies)   in `submit`: an exception that it raises at once, as a full or broken queue does
    failure(stream, copy)     before a page moves: an exception that the batch ends with
    delay_ns(stream, last)    before a page, and (`last`) between the last page and done: time on top of what was drawn
    reused(block)             when a block that a copy still reads gets a new owner: listeners hear of it
    hold(stream, step)        before each of these times begins to pass: True while the stream is *shut*. The step is
                              then kept and run when the stream is opened again.

Any number of rules may be there at once: the first refusal and the first failure count, delays add up, a stream is open
when everybody who shut it has opened it. `compute` is a stream like any other, without refusals.

Who holds: the world the rules, for its whole life; the rules keep the held steps until the stream is opened. A step of
an engine whose process has died is dropped by the loop when it would run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcore.ports import Copy

Refusal = Callable[[str, Sequence[Copy]], BaseException | None]
Failure = Callable[[str, Copy], BaseException | None]
Delay = Callable[[str, bool], int]
Hook = TypeVar("Hook")


class DeviceRules:
    """See the module's text. Each `add` answers a call that takes the rule away again."""

    __slots__ = ("_delays", "_failures", "_held", "_listeners", "_overtaken", "_refusals", "_shut")

    def __init__(self) -> None:
        self._refusals: list[Refusal] = []
        self._failures: list[Failure] = []
        self._delays: list[Delay] = []
        self._listeners: list[Callable[[int], None]] = []
        self._overtaken: list[Callable[[], None]] = []
        self._shut: Counter[str] = Counter()
        self._held: dict[str, list[Callable[[], None]]] = {}

    def add_refusal(self, rule: Refusal) -> Callable[[], None]:
        return _added(self._refusals, rule)

    def add_failure(self, rule: Failure) -> Callable[[], None]:
        return _added(self._failures, rule)

    def add_delay(self, rule: Delay) -> Callable[[], None]:
        return _added(self._delays, rule)

    def on_reuse(self, listener: Callable[[int], None]) -> Callable[[], None]:
        return _added(self._listeners, listener)

    def shut(self, stream: str, on_overtaken: Callable[[], None]) -> Callable[[], None]:
        """Nothing of this stream goes on until the answer is called. `on_overtaken` is called whenever a step of
        another stream goes on while one is held."""
        self._shut[stream] += 1
        forget = _added(self._overtaken, on_overtaken)

        def reopen() -> None:
            forget()
            self._shut[stream] -= 1
            if not self._shut[stream]:
                del self._shut[stream]
                for step in self._held.pop(stream, ()):
                    step()

        return reopen

    # ---- for the copy engine

    @property
    def on_time(self) -> bool:
        """No step is delayed or held."""
        return not (self._delays or self._shut)

    def refusal(self, stream: str, copies: Sequence[Copy]) -> BaseException | None:
        return next(filter(None, (rule(stream, copies) for rule in list(self._refusals))), None)

    def failure(self, stream: str, copy: Copy) -> BaseException | None:
        return next(filter(None, (rule(stream, copy) for rule in list(self._failures))), None)

    def delay_ns(self, stream: str, last: bool) -> int:
        return sum(rule(stream, last) for rule in self._delays)

    def reused(self, block: int) -> None:
        for listener in list(self._listeners):
            listener(block)

    def hold(self, stream: str, step: Callable[[], None]) -> bool:
        if not self._shut[stream]:
            for listener in list(self._overtaken) if self._held else ():
                listener()
            return False
        self._held.setdefault(stream, []).append(step)
        return True


def _added(rules: list[Hook], rule: Hook) -> Callable[[], None]:
    rules.append(rule)

    def remove() -> None:
        if rule in rules:
            rules.remove(rule)

    return remove
