"""What a tenant may have: by our own sum of what lies there, not by the ledger of whoever keeps the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvcore.quota import Quota


def over_quota(quota: Quota | None, sizes: Iterable[tuple[str, int]]) -> Iterator[str]:
    """In words, each tenant that has more than its share. `sizes`: a salt and bytes for each object."""
    if quota is None:
        return
    held: Counter[str] = Counter()
    for salt, size in sizes:
        held[salt] += size
    for salt, size in held.items():
        limit = quota.limit_of(salt)
        if limit is not None and size > limit:
            yield f"tenant {salt!r} has {size} bytes, its limit is {limit}"
