"""The preemption ladder over the whole matrix; the tests themselves ship in the package."""

from kvcore.ladder.suite.test_climb import test_cache_changes_no_output

__all__ = ["test_cache_changes_no_output"]
