"""These tests need vLLM (`make vllm`; `.venv-vllm/bin/python -m pytest tests/vllm`). Without it none is collected."""

from __future__ import annotations

import importlib.util
from typing import Any

MISSING = importlib.util.find_spec("vllm") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        terminalreporter.write_line("##### tests/vllm SKIPPED: vLLM is not installed here; see `make vllm` #####")


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning:torch")
