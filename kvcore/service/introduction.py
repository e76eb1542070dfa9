"""A worker's requests to a server that does not know it (any more). Shell, loop-confined.

A server forgets its workers when it restarts, and those that were silent for too long. What such a worker asks is
refused with UNKNOWN_WORKER and nothing has been done; so the worker registers and asks once more. Else the first store
after each restart or reaping would be lost.

Who holds, announces, frees: as for any request of a connection.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.service.connection import Connection
from kvcore.service.debts import ReplyCallback
from kvcore.service.protocol import Error, ErrorCode, Reply, Request


def is_unknown_worker(reply: Reply) -> bool:
    """The server does not know who asks, and has done nothing."""
    return isinstance(reply, Error) and reply.code is ErrorCode.UNKNOWN_WORKER


def ask_as_known(
    connection: Connection,
    message: Request,
    callback: ReplyCallback,
    register: Callable[[Connection], None],
    wanted: Callable[[], bool],
) -> None:
    """Request it; where the worker is not known, `register` and request it once more. `callback` runs once.

    Nothing is asked again that is not `wanted` any more: what was given up has its end on the way already.
    """

    def answered(reply: Reply) -> None:
        if is_unknown_worker(reply) and wanted():
            register(connection)
            connection.request(message, callback)
        else:
            callback(reply)

    connection.request(message, answered)
