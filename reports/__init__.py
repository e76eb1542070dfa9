"""The verdict (`kvcore.reports`): when is loading KV cheaper than recomputing it. `cost` holds the closed forms."""
