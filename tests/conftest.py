"""Hypothesis profiles of all tests: `patient` for `make test`, `soak` for long searches.

Neither times an example: on a busy machine Hypothesis' own limits (200 ms for an example, a second for drawing a few)
fail tests in which nothing is wrong. `patient` is otherwise what Hypothesis would take, with CI=true or without.

Choose one with `--hypothesis-profile=soak` or the environment variable HYPOTHESIS_PROFILE. The machines scale with it:
their budgets are multiples of the profile's `max_examples`.
"""

from __future__ import annotations

import os

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environment of the vLLM tests has none of it, and they need none
    pass
else:
    settings.register_profile(
        "soak", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "patient")
