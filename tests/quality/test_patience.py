"""No test is timed by Hypothesis: a busy machine would fail it."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parents[1]


def timed(text: str) -> list[int]:
    """Lines that ask Hypothesis for a deadline of examples."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        for keyword in call.keywords
        if getattr(call.func, "id", "") == "settings" and keyword.arg == "deadline"
        if not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
    ]


def test_the_profile_of_all_tests_times_nothing() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_no_test_asks_for_a_deadline_of_its_own() -> None:
    assert timed("settings(max_examples=3, deadline=200)\nsettings(deadline=None)\n") == [1]
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    assert [str(path.relative_to(TESTS)) for path in files if timed(path.read_text())] == []
