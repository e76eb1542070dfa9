"""The fence: in a simulated run nobody reads the real clock, draws real randomness or starts anything real.

Theory of operation
-------------------
One forgotten `time.monotonic()` makes a run depend on the machine, and no test of behaviour would show it. While the
loop steps, the doors to the outside are replaced by functions that raise `FenceError` with the name of the caller.

    1.  `__enter__` replaces the functions in `_DOORS`, and every name in a loaded `kvcore` module that was bound to
        one of them (`from time import monotonic` before the run). Classes keep their identity; only the method that
        opens the door (`Thread.start`, `socket.__init__`) is replaced.
    2.  A call from another thread than the one that entered passes: test runners have threads of their own.
    3.  A call that comes directly from `logging` or from a test tool passes: a log record has a time stamp, and no
        decision hangs on it.
    4.  Any other call raises. The code under test may swallow exceptions, so the error also goes to `on_violation`,
        which ends the run whatever happens to the raised one.
    5.  `__exit__` puts back what `__enter__` found, in reverse order. Fences nest: an inner one finds the outer one's
        functions, and puts those back.

Beyond its reach: `datetime.now`, whose class cannot be changed, and functions bound at import in modules other than
kvcore's. A test on the sources covers the first.

The loop enters its fence when it begins to step and leaves it when it stops; there is no state outside the `Fence`.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

_CLOCK = "use the Clock port (now_ns), or loop.time()"
_SLEEP = "await asyncio.sleep()"
_RANDOM = "use a named stream of the run (loop.streams), or the Clock port's token() for names"
_THREAD = "submit blocking work to the Executor port"
_NETWORK = "use the transport ports"
_PROCESS = "use SimLoop.process()"

_TIME_READERS = (
    "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns "
    "thread_time thread_time_ns clock_gettime clock_gettime_ns"
)
_RANDOM_FUNCTIONS = (
    "random uniform triangular randint choice randrange sample shuffle choices normalvariate lognormvariate "
    "expovariate vonmisesvariate gammavariate gauss betavariate binomialvariate paretovariate weibullvariate "
    "getrandbits randbytes seed getstate setstate"
)
_SECRETS = "token_bytes token_hex token_urlsafe randbelow randbits choice"

_DOORS: tuple[tuple[Any, str, str], ...] = (
    (time, _TIME_READERS, _CLOCK),
    (time, "sleep", _SLEEP),
    (random, _RANDOM_FUNCTIONS, _RANDOM),
    (random.SystemRandom, "random getrandbits randbytes", _RANDOM),
    (os, "urandom getrandom", _RANDOM),
    (uuid, "uuid1 uuid4", _RANDOM),
    (secrets, _SECRETS, _RANDOM),
    (threading.Thread, "start", _THREAD),
    (socket.socket, "__init__", _NETWORK),
    (subprocess.Popen, "__init__", _PROCESS),
    (os, "fork system posix_spawn", _PROCESS),
)
_PASS_FROM = frozenset({"logging", "pytest", "_pytest", "hypothesis", "coverage"})
_WRAPPERS = frozenset({"random", "secrets", "uuid", "threading", "socket", "subprocess", "os", "concurrent", "asyncio"})
_WATCHED = ("kvcore",)
_MISSING = object()


class FenceError(RuntimeError):
    """Code under simulation reached for the real world."""


def _top_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?")).partition(".")[0]


def _direct_caller() -> FrameType:
    """The frame that called the replaced function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    assert frame is not None
    return frame


def _blamed(frame: FrameType) -> FrameType:
    """The first frame outside the standard modules that only pass the call on."""
    while _top_module(frame) in _WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _ignore(error: FenceError) -> None:
    return None


class Fence:
    """A context manager; see the module's text. `on_violation` gets every error before it is raised."""

    __slots__ = ("_entered_by", "_on_violation", "_replaced")

    def __init__(self, on_violation: Callable[[FenceError], None] = _ignore) -> None:
        self._on_violation = on_violation
        self._replaced: list[tuple[Any, str, Any]] = []
        self._entered_by = -1

    def __enter__(self) -> Fence:
        assert not self._replaced, "a fence is entered once at a time"
        self._entered_by = threading.get_ident()
        replacements: dict[int, Any] = {}
        for owner, names, instead in _DOORS:
            for name in names.split():
                self._shut(owner, name, instead, replacements)
        self._shut_aliases(replacements)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._replaced:
            owner, name, found = self._replaced.pop()
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)

    def _shut(self, owner: Any, name: str, instead: str, replacements: dict[int, Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:  # not on this platform or Python
            return
        shut = self._raising(original, f"{owner.__name__}.{name}", instead)
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, shut)
        if not isinstance(owner, type):
            replacements[id(original)] = shut

    def _shut_aliases(self, replacements: dict[int, Any]) -> None:
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] not in _WATCHED or module is None:
                continue
            for name, value in list(vars(module).items()):
                shut = replacements.get(id(value))
                if shut is not None:
                    self._replaced.append((module, name, value))
                    setattr(module, name, shut)

    def _raising(self, original: Any, what: str, instead: str) -> Any:
        def shut(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._entered_by:
                return original(*args, **kwargs)
            caller = _direct_caller()
            if _top_module(caller) in _PASS_FROM:
                return original(*args, **kwargs)
            return self._violated(what, instead, _blamed(caller))

        return shut

    def _violated(self, what: str, instead: str, frame: FrameType) -> NoReturn:
        module = frame.f_globals.get("__name__", "?")
        code = frame.f_code
        error = FenceError(
            f"{what} was called in a simulated run by {module}.{code.co_qualname} "
            f"({code.co_filename}:{frame.f_lineno}). Instead, {instead}."
        )
        self._on_violation(error)
        raise error
