"""How a process of the torch target serves: messages in on one socket, answers back to who asked, until SIGTERM.

Who holds: the caller's loop holds the tasks until they have ended. Who announces: `ready` on standard output. Who
frees: `close`, after the socket.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from kvcore.service.zmq_transport import ZmqServerTransport

Tell = Callable[[bytes], None]


async def serve_until_told(
    address: str, work: Callable[[Tell, bytes], Coroutine[Any, Any, None]], close: Callable[[], None]
) -> None:
    """Run `work(tell, payload)` for every message; `tell` sends an answer, as often as it likes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    transport = ZmqServerTransport(loop, address)
    tasks: set[asyncio.Task[None]] = set()

    def received(peer: bytes, payload: bytes) -> None:
        def tell(answer: bytes) -> None:
            transport.send(peer, answer)

        task = loop.create_task(work(tell, payload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    transport.receive(received)
    print("ready", flush=True)
    await stop.wait()
    transport.close()
    close()
