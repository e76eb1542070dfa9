"""The machine's clock and entropy. Never steps backwards; tokens are for names, never for decisions."""

from __future__ import annotations

import secrets
import time

from kvcore.ports import TimeNs


class SystemClock:
    """`kvcore.ports.Clock` on the operating system. Stateless: any thread may use it."""

    def now_ns(self) -> TimeNs:
        return TimeNs(time.monotonic_ns())

    def token(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)
