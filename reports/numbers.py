"""Checks of numbers that people type. Each error names the field, the value and the range it must be in."""

from __future__ import annotations

import math

from kvcore.errors import ConfigError


def check_count(field: str, value: int, low: int, high: int) -> None:
    """A whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field} must be a whole number: {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{field} must be from {low:,} to {high:,}: {value:,}")


def check_positive(field: str, value: float, high: float) -> None:
    """A finite number above 0 and at most `high`."""
    if not math.isfinite(value) or not 0 < value <= high:
        raise ConfigError(f"{field} must be above 0 and at most {high:.4g}: {value:.4g}")


def check_not_negative(field: str, value: float, high: float) -> None:
    """A finite number from 0 to `high`."""
    if not math.isfinite(value) or not 0 <= value <= high:
        raise ConfigError(f"{field} must be from 0 to {high:.4g}: {value:.4g}")


def check_text(field: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{field} is empty: every entry needs a {field}")
