"""The state of components in one line each, from their frozen `statistics()`.

    server0.l1: bytes_used=2048 objects_resident=4 leases=2
    worker0: stores_open=1

What is zero, empty or unlimited is left out: in a failing run the question is what is *not* at rest. Nested statistics
are flattened with a dot, lists of them are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

_VALUE_MAX = 60


def state_line(name: str, *states: object) -> str:
    """One line: the name and every value that is not nothing."""
    parts = [f"{key}={value}" if key else str(value) for state in states for key, value in flat(state)]
    return f"{name}: " + (" ".join(parts) or "nothing")


def flat(state: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every value that is not zero, empty or None."""
    if is_dataclass(state) and not isinstance(state, type):
        for item in fields(state):
            yield from flat(getattr(state, item.name), _joined(prefix, item.name))
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from flat(value, _joined(prefix, str(key)))
    elif isinstance(state, tuple | list):
        for index, value in enumerate(state):
            yield from flat(value, _joined(prefix, str(index)))
    elif state:
        yield prefix, _text(state)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _text(value: Any) -> str:
    text = str(value.value if isinstance(value, Enum) else value)
    return text if len(text) <= _VALUE_MAX else text[: _VALUE_MAX - 3] + "..."
