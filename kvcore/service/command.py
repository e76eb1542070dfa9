"""`kvcore serve`, and what an operator asks a running server: `ping`, `status`, `clear`; `keys` makes CURVE keys.

Exit status as in `kvcore.cli`: 0 done, 1 the server did not answer or answered an error, 2 unusable input.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvcore.cli import parse_bytes
from kvcore.errors import ConfigError
from kvcore.operations import logs
from kvcore.operations.http import HttpServer
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.loops import run
from kvcore.service import protocol as wire
from kvcore.service.curve import CurveClient, make_keys
from kvcore.service.host import ServerHost
from kvcore.service.operator import ask
from kvcore.service.serve_config import ServeConfig, load_serve_config

T = TypeVar("T")

_ENDING = (signal.SIGTERM, signal.SIGINT)

# A lookup makes thousands of small objects that no cycle holds. At the usual 700 the collector walks the live ones of
# all sessions again and again, for a third of the time of a lookup.
_COLLECT_AFTER = (10_000, 20, 20)

_FLAGS = {
    "listen": "listen",
    "l1": "l1.capacity_bytes",
    "l2": "l2",
    "chunk_tokens": "chunk_tokens",
    "policy": "l1.policy",
    "transfer": "transfer",
    "retain": "storage.retain",
    "curve_secret": "curve.secret_file",
    "curve_clients": "curve.clients_directory",
    "http": "http.listen",
    "log_format": "log.format",
    "log_level": "log.level",
}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands."""
    _register_serve(commands)
    _register_question(commands, "ping", "is a server there, and how long does an answer take", _ping)
    _register_question(commands, "status", "what a server is doing", _status)
    _register_question(commands, "clear", "make a server forget its L1 (not what is in use, not L2)", _clear)
    keys = commands.add_parser("keys", help="make a pair of CURVE keys", description="Make a pair of CURVE keys.")
    keys.add_argument("directory", type=Path)
    keys.add_argument("name")
    keys.set_defaults(run=_keys)


def _register_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Serve a KV cache to the engines of this machine (ipc, loopback) or, with keys, of others."
    parser = commands.add_parser("serve", help="run a cache server", description=text)
    parser.add_argument("--listen", metavar="ADDRESS", help="ipc:///path or tcp://HOST:PORT")
    parser.add_argument("--l1", type=parse_bytes, metavar="SIZE", help="shared memory for L1, such as 8GiB")
    parser.add_argument("--l2", action="append", metavar="URL", help="a store behind L1; again for the next one")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="tokens per chunk (default 256)")
    parser.add_argument("--policy", metavar="NAME", help="eviction: lru or s3fifo")
    parser.add_argument("--transfer", metavar="WHO", help="who may copy KV: both (workers choose) or worker")
    parser.add_argument("--retain", action="store_true", default=None, help="keep in L1 what was loaded from L2")
    parser.add_argument("--curve-secret", metavar="FILE", help="this server's .key_secret file")
    parser.add_argument("--curve-clients", metavar="DIR", help="directory with the .key files of known clients")
    parser.add_argument("--http", metavar="HOST:PORT", help="metrics and health, on loopback; empty for none")
    parser.add_argument("--log-format", metavar="NAME", help="text or json")
    parser.add_argument("--log-level", metavar="NAME", help="debug, info, warning or error")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; flags and KVCORE_* variables go before it")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")
    parser.set_defaults(run=_serve)


def _register_question(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
) -> None:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("address", nargs="?", help="the server's; default: where this user's server listens")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds to wait (default 5)")
    parser.add_argument("--curve-secret", type=Path, metavar="FILE", help="your .key_secret file")
    parser.add_argument("--curve-server", type=Path, metavar="FILE", help="the server's .key file")
    parser.set_defaults(run=run)


# -- serve


def _serve(arguments: argparse.Namespace) -> int:
    given = {path: getattr(arguments, name) for name, path in _FLAGS.items()}
    flags = {path: value for path, value in given.items() if value is not None}
    loaded = load_serve_config(flags, os.environ, arguments.config)
    if arguments.print_config:
        print(loaded.render(), end="")
        return 0
    logs.configure(loaded.value.log)
    gc.set_threshold(*_COLLECT_AFTER)
    return run(_serve_until_told(loaded.value))


async def _serve_until_told(config: ServeConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, stop.set)
    host = ServerHost(config)
    await host.start()
    http = None
    try:
        if config.http.listen:
            http = HttpServer(loop, config.http.listen, host.statistics)
            print(f"kvcore serve: health and metrics on {http.address}", flush=True)
        print(f"kvcore serve: listening on {host.address}", flush=True)
        await stop.wait()
        _ignore(loop)
    finally:
        if http is not None:
            http.close()
        await host.close()
    return 0


def _ignore(loop: asyncio.AbstractEventLoop) -> None:
    """The end has begun and is bounded: being told again changes nothing, also when the loop has gone."""
    for number in _ENDING:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


# -- questions


def _asked(arguments: argparse.Namespace, request: wire.Status | wire.Clear) -> wire.Reply:
    curve = None
    if (arguments.curve_secret is None) != (arguments.curve_server is None):
        raise ConfigError("--curve-secret and --curve-server are needed together")
    if arguments.curve_secret is not None:
        curve = CurveClient.load(arguments.curve_secret, arguments.curve_server)
    address = arguments.address or ServeConfig().address
    return run(ask(address, request, timeout_s=arguments.timeout, curve=curve))


def _ping(arguments: argparse.Namespace) -> int:
    clock = SystemClock()
    begin_ns = clock.now_ns()
    _asked(arguments, wire.Status())
    print(f"answered in {(clock.now_ns() - begin_ns) / 1e6:.1f} ms")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    reply = _asked(arguments, wire.Status())
    assert isinstance(reply, wire.StatusReply)
    json.dump(dict(sorted(reply.counters.items())), sys.stdout, indent=1)
    print()
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    reply = _asked(arguments, wire.Clear())
    assert isinstance(reply, wire.Cleared)
    print(f"{reply.objects} objects dropped from L1")
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    public, secret = make_keys(arguments.directory, arguments.name)
    print(f"{public}: give it to the other side\n{secret}: keep it private")
    return 0
