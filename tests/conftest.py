"""Hypothesis profiles of all tests: `default` for `make test`, `soak` for long searches.

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
    if os.environ.get("HYPOTHESIS_PROFILE"):
        settings.load_profile(os.environ["HYPOTHESIS_PROFILE"])
