"""What several files of this folder need."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """`scripts/NAME.py` as a module; the same one each time it is asked for."""

    def load(name: str) -> ModuleType:
        known = f"kvcore_script_{name}"
        if known not in sys.modules:
            specification = importlib.util.spec_from_file_location(known, SCRIPTS / f"{name}.py")
            assert specification is not None
            assert specification.loader is not None
            sys.modules[known] = importlib.util.module_from_spec(specification)  # dataclasses look their module up
            specification.loader.exec_module(sys.modules[known])
        return sys.modules[known]

    return load
