"""These tests need vLLM (`make vllm`; `.venv-vllm/bin/python -m pytest tests/vllm`). Without it none is collected."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from typing import Any

import pytest

from kvcore.service.client import ConnectionConfig, SchedulerConfig

MISSING = importlib.util.find_spec("vllm") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []
PATIENCE_NS = 60_000_000_000
ON_REAL_THREADS = ("test_connector.py", "test_cuda_emulated.py")
WAITS_FOR_NOBODY = "test_a_server_that_is_not_there_is_told_of_and_the_engine_computes"


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine gives a cache two seconds. On a busy machine that would be misses where tests count hits, so here what
    is not said otherwise is a minute, save where no answer ever comes."""
    if request.path.name not in ON_REAL_THREADS or request.node.name == WAITS_FOR_NOBODY:
        return
    for config in (ConnectionConfig, SchedulerConfig):
        patient = tuple(
            PATIENCE_NS if field.name.endswith("timeout_ns") else default
            for field, default in zip(fields(config), config.__init__.__defaults__ or (), strict=True)
        )
        monkeypatch.setattr(config.__init__, "__defaults__", patient)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        terminalreporter.write_line("##### tests/vllm SKIPPED: vLLM is not installed here; see `make vllm` #####")


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning:torch")
