"""What a cache server is told, and what it reports about itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.errors import ConfigError
from kvcore.service.page_desk import PageStatistics

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`segment` names the arena for the workers; `store_lease_ns` bounds the time between STORE and COMMIT.

    A worker that has something open and is not heard of for `worker_silence_ns` is reaped; clients learn it from the
    limits, and ping accordingly.
    """

    segment: str = field(default="", metadata={"internal": True})
    session_idle_ns: int = 600 * _NS_PER_S
    store_lease_ns: int = 120 * _NS_PER_S
    worker_silence_ns: int = 30 * _NS_PER_S

    def __post_init__(self) -> None:
        if min(self.session_idle_ns, self.store_lease_ns, self.worker_silence_ns) <= 0:
            raise ConfigError("session_idle_ns, store_lease_ns and worker_silence_ns must be positive")


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """`requests` counts every frame once; `errors` those answered with that code; the rest was carried out."""

    incarnation: int
    requests: int
    requests_by_operation: dict[str, int]
    errors: dict[str, int]
    bytes_in: int
    bytes_out: int
    connections: int
    sessions: int
    sessions_opened: int  # generations begun
    sessions_expired: int
    sessions_ended: int
    lookups_open: int
    workers: int
    stores_open: int
    reads_open: int
    workers_reaped: int  # since the beginning
    pages: PageStatistics | None = None  # None: this server does not copy by itself
