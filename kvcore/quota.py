"""Per-tenant limits in bytes. A tenant is a cache salt.

The one rule for tenants without a limit of their own: *each* of them gets `default_bytes` (they do not share it), and
None means that they are limited only by the memory there is. The empty salt is a tenant like any other.

Charged is what a tenant's objects occupy, from reservation until the memory is free again: staging, resident and
draining. So a tenant gains nothing by abandoning writes, and the charges add up to the bytes used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits per salt; `default_bytes` for each salt that is not listed (None: no limit)."""

    limits: Mapping[str, int] = field(default_factory=dict)
    default_bytes: int | None = None

    def __post_init__(self) -> None:
        for salt, limit in self.limits.items():
            if limit < 0:
                raise ConfigError(f"the quota of tenant {salt!r} must not be negative, it is {limit}")
        if self.default_bytes is not None and self.default_bytes < 0:
            raise ConfigError(f"the default quota must not be negative, it is {self.default_bytes}")

    def limit_of(self, salt: str) -> int | None:
        return self.limits.get(salt, self.default_bytes)


class QuotaLedger:
    """What each tenant occupies now."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._bytes_used: dict[str, int] = {}

    def excess(self, salt: str, extra_bytes: int) -> int:
        """By how many bytes the tenant would be over its limit with `extra_bytes` more (0: it fits)."""
        assert extra_bytes >= 0
        limit = self._quota.limit_of(salt)
        return 0 if limit is None else max(0, self.bytes_used(salt) + extra_bytes - limit)

    def can_ever_hold(self, salt: str, size_bytes: int) -> bool:
        limit = self._quota.limit_of(salt)
        return limit is None or size_bytes <= limit

    def charge(self, salt: str, size_bytes: int) -> None:
        assert size_bytes > 0
        self._bytes_used[salt] = self.bytes_used(salt) + size_bytes

    def credit(self, salt: str, size_bytes: int) -> None:
        left = self._bytes_used[salt] - size_bytes
        assert left >= 0, "more credited than charged"
        if left:
            self._bytes_used[salt] = left
        else:
            del self._bytes_used[salt]

    def bytes_used(self, salt: str) -> int:
        return self._bytes_used.get(salt, 0)

    @property
    def bytes_total(self) -> int:
        return sum(self._bytes_used.values())
