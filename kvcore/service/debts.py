"""`Debts`: messages that must arrive at a server some time: releases, aborts, ends of copies. Shell, loop-confined.

Theory of operation
-------------------
    owed --request--> under way --any answer but "I cannot read this"--> paid
                         |--no answer--> waiting (back-off, doubles) --> under way ...
                         `--`resends_max` silent attempts--> asleep --the server is heard from--> under way

1. A newer message under the same key replaces the older one; `forgive` takes one back.
2. After `resends_max` silent attempts a debt sleeps: no timer is left running for a dead server. It is paid when the
   server is next heard from (`wake`).
3. A debt of a life of the server that has ended is void, unless its cause lives on in the next one (`keep`); then it is
   owed to that one (RESTARTED is no payment).

Who holds: a debt is held here until it is paid or void. Who announces: the reply. Who frees: this object; `drop` gives
up all of it.

Rejected: a debt that is repeated for ever (a timer that never ends, for a server that may never come back).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from kvcore.service.protocol import Error, ErrorCode, Reply, Request, subject_of

ReplyCallback = Callable[[Reply], None]

_NS_PER_S = 1_000_000_000
_LOST = frozenset((ErrorCode.TIMEOUT, ErrorCode.DISCONNECTED))
"""Whether the server saw the request is not known, or it certainly did not."""
UNREAD = frozenset((ErrorCode.MALFORMED, ErrorCode.TOO_LARGE))
"""The server saw something else than what we sent: frames were damaged on their way."""


class Pace(Protocol):
    """How often a debt is repeated, and how long it is waited for that."""

    @property
    def resend_ns(self) -> int: ...

    @property
    def resend_ns_max(self) -> int: ...

    @property
    def resends_max(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Debt:
    """`under_way`: a request for it is outstanding."""

    message: Request
    attempts: int = 0
    under_way: bool = False
    timer: asyncio.TimerHandle | None = field(default=None)

    @property
    def asleep(self) -> bool:
        """Given up until the server is heard from."""
        return self.timer is None and not self.under_way


class Debts:
    """See the module text. `request` sends a message and calls back with its reply, once."""

    def __init__(self, request: Callable[[Request, ReplyCallback], None], pace: Pace) -> None:
        self._request = request
        self._pace = pace
        self._debts: dict[str, _Debt] = {}
        self.resends = 0

    def __len__(self) -> int:
        return len(self._debts)

    def __contains__(self, key: object) -> bool:
        return key in self._debts

    @property
    def asleep(self) -> int:
        """Of these: given up until the server is heard from."""
        return sum(debt.asleep for debt in self._debts.values())

    def owe(self, key: str, message: Request) -> None:
        """Get this message to the server sooner or later; it replaces an unpaid one under the same key."""
        self.forgive(key)
        debt = self._debts[key] = _Debt(message)
        self._pay(key, debt)

    def forgive(self, key: str) -> None:
        """The message under `key` need not arrive any more."""
        debt = self._debts.pop(key, None)
        if debt is not None and debt.timer is not None:
            debt.timer.cancel()

    def keep(self, subjects: Collection[tuple[str, str] | None]) -> None:
        """A life of the server has ended: what is not about any of these is void."""
        for key, debt in list(self._debts.items()):
            if subject_of(debt.message) not in subjects:
                self.forgive(key)

    def drop(self) -> None:
        """Nothing is owed any more."""
        for key in list(self._debts):
            self.forgive(key)

    def wake(self) -> None:
        """The server is there: pay what had been given up."""
        for key, debt in list(self._debts.items()):
            if debt.asleep:
                debt.attempts = 0
                self._pay(key, debt)

    def _pay(self, key: str, debt: _Debt) -> None:
        assert not debt.under_way
        assert self._debts.get(key) is debt
        debt.under_way = True
        debt.attempts += 1
        self.resends += debt.attempts > 1
        self._request(debt.message, lambda reply: self._paid(key, debt, reply))

    def _paid(self, key: str, debt: _Debt, reply: Reply) -> None:
        debt.under_way = False
        if self._debts.get(key) is not debt:
            return
        if isinstance(reply, Error) and reply.code is ErrorCode.RESTARTED:
            debt.attempts = 0
            self._pay(key, debt)  # its cause went on into the new life, and is ahead of it
            return
        code = reply.code if isinstance(reply, Error) else None
        if code not in _LOST | UNREAD:
            del self._debts[key]
        elif debt.attempts < self._pace.resends_max:
            delay_ns = min(self._pace.resend_ns << (debt.attempts - 1), self._pace.resend_ns_max)
            debt.timer = asyncio.get_running_loop().call_later(delay_ns / _NS_PER_S, self._resend, key, debt)
        elif code in UNREAD:
            del self._debts[key]  # the server is there and will never understand it

    def _resend(self, key: str, debt: _Debt) -> None:
        debt.timer = None
        if self._debts.get(key) is debt and not debt.under_way:
            self._pay(key, debt)
