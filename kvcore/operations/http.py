"""`/healthz`, `/status` and `/metrics` over HTTP: read-only, on loopback.

Theory of operation
-------------------
The standard library's server answers in threads of its own. It touches no state: each request asks the loop for one
snapshot (`statistics()`, a frozen value) and waits a bounded time for it. So a loop that hangs shows as unhealthy, and
a slow scraper holds up nobody.

    /healthz   200 "ok" when the loop answers in time, else 503
    /status    the snapshot as JSON
    /metrics   Prometheus' text format; 501 where prometheus-client is not installed

Anything else is 404, any method but GET and HEAD 501. An address beyond this machine is refused: what it shows is not
secret, but it is nobody else's business.

Who holds: this object the listening socket and the threads. Who frees: `close`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvcore.errors import ConfigError
from kvcore.operations import metrics
from kvcore.service.host import HostStatistics

ANSWERS_IN_S = 2.0
_TEXT = "text/plain; charset=utf-8"


class HttpServer:
    """See the module text. `snapshot` runs on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listen: str, snapshot: Callable[[], HostStatistics]) -> None:
        host, port = _address(listen)
        self._loop = loop
        self._snapshot = snapshot
        try:
            self._server = _Server((host, port), self._handler())
        except OSError as error:
            raise ConfigError(f"http.listen {listen}: {error.strerror}; choose another port, or 0 for any") from None
        self.address = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvcore-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; requests under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """(status, content type, body). Called in the threads of the HTTP server."""
        if path not in ("/healthz", "/status", "/metrics"):
            return HTTPStatus.NOT_FOUND, _TEXT, b"there are /healthz, /status and /metrics\n"
        try:
            state = self._ask()
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"the server's loop does not answer\n"
        if path == "/healthz":
            return HTTPStatus.OK, _TEXT, b"ok\n"
        if path == "/status":
            return HTTPStatus.OK, "application/json", json.dumps(dataclasses.asdict(state), indent=1).encode() + b"\n"
        return _metrics(state)

    def _ask(self) -> HostStatistics:
        answered: Future[HostStatistics] = Future()
        try:
            self._loop.call_soon_threadsafe(_resolve, answered, self._snapshot)
        except RuntimeError as error:  # the loop is closed
            raise TimeoutError from error
        return answered.result(ANSWERS_IN_S)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            timeout = ANSWERS_IN_S  # of the socket: a client that sends nothing gives its thread back

            def do_GET(self) -> None:
                self._reply(with_body=True)

            def do_HEAD(self) -> None:
                self._reply(with_body=False)

            def _reply(self, with_body: bool) -> None:
                status, kind, body = answer(self.path.partition("?")[0])
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """Scrapes come every few seconds; they are not news."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, _request: object, _client: object) -> None:
        """A client that went away in the middle is its own affair."""


def _resolve(answered: Future[HostStatistics], snapshot: Callable[[], HostStatistics]) -> None:
    try:
        answered.set_result(snapshot())
    except BaseException as error:
        answered.set_exception(error)


def _metrics(state: HostStatistics) -> tuple[int, str, bytes]:
    try:
        return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", metrics.exposition(state)
    except ImportError:
        return HTTPStatus.NOT_IMPLEMENTED, _TEXT, b"metrics need prometheus-client: pip install 'kvcore[serve]'\n"


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not (port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"http.listen {listen!r}: write HOST:PORT, such as 127.0.0.1:9400, or port 0 for any")
    try:
        loopback = host == "localhost" or ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"http.listen {listen!r}: only addresses of this machine (127.0.0.1) are allowed")
    return host, int(port)
