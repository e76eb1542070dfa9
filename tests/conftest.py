"""What all tests share: Hypothesis profiles, and `absent`, for what is not installed where they run.

The profiles: `patient` for `make test`, `soak` for long searches.

Neither times an example: on a busy machine Hypothesis' own limits (200 ms for an example, a second for drawing a few)
fail tests in which nothing is wrong. `patient` is otherwise what Hypothesis would take, with CI=true or without.

Choose one with `--hypothesis-profile=soak` or the environment variable HYPOTHESIS_PROFILE. The machines scale with it:
their budgets are multiples of the profile's `max_examples`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import NoReturn

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environment of the vLLM tests has none of it, and they need none
    pass
else:
    settings.register_profile(
        "soak", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(
        "brief", settings(), max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "patient")


@pytest.fixture(scope="session")
def absent() -> Callable[[str], NoReturn]:
    """`absent("such a server is not installed: its tests do not run")`: skip loudly, or fail where CI is true."""

    def leave(text: str) -> NoReturn:
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(text)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(text, stacklevel=2)
        pytest.skip(text)

    return leave
