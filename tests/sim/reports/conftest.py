"""The rigs of the simulated scenarios, for the public reports: `desk_of`, `world_of` and, from above, `rig_of`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIM = Path(__file__).parent.parent


def _load(name: str, path: Path) -> Any:
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, path)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def desk_module() -> Any:
    return _load("kvcore_report_desk", SIM / "connector" / "conftest.py")


@pytest.fixture
def desk_of(desk_module: Any) -> Callable[..., Any]:
    """An engine of one batch, driven by hand (`tests/sim/connector/conftest.py`)."""
    return desk_module.Desk


@pytest.fixture
def service() -> Any:
    """Servers, a scheduler and workers on a simulated network (`tests/sim/test_service.py`)."""
    return _load("kvcore_report_service", SIM / "test_service.py")


@pytest.fixture
def hybrid(desk_module: Any) -> tuple[Any, ...]:
    """Full attention, a window of 24 tokens and a recurrent state."""
    return (desk_module.FULL, desk_module.WINDOW, desk_module.RECURRENT)
