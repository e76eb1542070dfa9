"""What a simulated loop does not have: threads, sockets, pipes, subprocesses, signals. Refusals say what to use."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from kvcore.errors import CallerError

_THREADS = "submit blocking work to the Executor port"
_NETWORK = "talk through the ClientTransport and ServerTransport ports"
_FILES = "use the Files port, or a Notice for wake-ups from other threads"
_PROCESSES = "start a simulated process with SimLoop.process(name)"
_SIGNALS = "call SimProcess.crash(), or cancel the task"


def refuse(what: str, instead: str) -> NoReturn:
    raise CallerError(f"SimLoop has no {what}: there is no outside world in a simulation. Instead, {instead}.")


def _refused(what: str, instead: str) -> Any:
    def method(self: asyncio.AbstractEventLoop, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(what, instead)

    method.__name__ = method.__qualname__ = what
    return method


class NoOutsideLoop(asyncio.AbstractEventLoop):
    """An event loop whose every door to the outside is shut."""

    run_in_executor = _refused("run_in_executor", _THREADS)
    set_default_executor = _refused("set_default_executor", _THREADS)
    add_reader = _refused("add_reader", _FILES)
    remove_reader = _refused("remove_reader", _FILES)
    add_writer = _refused("add_writer", _FILES)
    remove_writer = _refused("remove_writer", _FILES)
    connect_read_pipe = _refused("connect_read_pipe", _FILES)
    connect_write_pipe = _refused("connect_write_pipe", _FILES)
    getaddrinfo = _refused("getaddrinfo", _NETWORK)
    getnameinfo = _refused("getnameinfo", _NETWORK)
    create_connection = _refused("create_connection", _NETWORK)
    create_server = _refused("create_server", _NETWORK)
    create_unix_connection = _refused("create_unix_connection", _NETWORK)
    create_unix_server = _refused("create_unix_server", _NETWORK)
    create_datagram_endpoint = _refused("create_datagram_endpoint", _NETWORK)
    connect_accepted_socket = _refused("connect_accepted_socket", _NETWORK)
    start_tls = _refused("start_tls", _NETWORK)
    sendfile = _refused("sendfile", _NETWORK)
    sock_recv = _refused("sock_recv", _NETWORK)
    sock_recv_into = _refused("sock_recv_into", _NETWORK)
    sock_recvfrom = _refused("sock_recvfrom", _NETWORK)
    sock_recvfrom_into = _refused("sock_recvfrom_into", _NETWORK)
    sock_sendall = _refused("sock_sendall", _NETWORK)
    sock_sendto = _refused("sock_sendto", _NETWORK)
    sock_connect = _refused("sock_connect", _NETWORK)
    sock_accept = _refused("sock_accept", _NETWORK)
    sock_sendfile = _refused("sock_sendfile", _NETWORK)
    subprocess_shell = _refused("subprocess_shell", _PROCESSES)
    subprocess_exec = _refused("subprocess_exec", _PROCESSES)
    add_signal_handler = _refused("add_signal_handler", _SIGNALS)
    remove_signal_handler = _refused("remove_signal_handler", _SIGNALS)
    set_task_factory = _refused("set_task_factory", "use create_task, whose tasks hash as their number")

    def get_task_factory(self) -> None:
        return None

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: `close` disposes of what is left."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no executor."""

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """asyncio's debug mode measures with the real clock; a run has its trace instead."""
