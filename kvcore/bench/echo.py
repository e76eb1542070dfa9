"""The yardstick for a server's round trips: a `zmq.asyncio` ROUTER that sends every message back, in its own process.

    python -m kvcore.bench.echo ADDRESS

The same loop class as `kvcore serve`, no work at all: what a service in this language on this socket costs at least.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import zmq
import zmq.asyncio

from kvcore.runtime.loops import run


async def _echo(address: str) -> None:
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(address)
    print("ready", flush=True)
    while True:
        await socket.send_multipart(await socket.recv_multipart())


def main() -> None:
    with suppress(KeyboardInterrupt):
        run(_echo(sys.argv[1]))


if __name__ == "__main__":
    main()
