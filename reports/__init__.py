"""The verdict (`kvcore.reports`): when is loading KV cheaper than recomputing it. Empty until the cost model lands."""
