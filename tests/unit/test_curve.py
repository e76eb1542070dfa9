"""CURVE keys: who is known gets through, who is not never reaches the server; key files are made and read safely."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.service.curve import CurveClient, CurveServer, make_keys
from kvcore.service.zmq_transport import ZmqClientTransport, ZmqServerTransport, check_address

PATIENCE_S = 60.0
UNKNOWN_GETS_S = 0.5  # how long a client without a place in the list may try


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A server, a client it knows, and a stranger's pair in another directory."""
    make_keys(tmp_path, "server")
    make_keys(tmp_path / "clients", "engine")
    make_keys(tmp_path / "strangers", "stranger")
    return tmp_path


def server_keys(keys: Path) -> CurveServer:
    return CurveServer.load(keys / "server.key_secret", keys / "clients")


def client_keys(keys: Path, folder: str, name: str) -> CurveClient:
    return CurveClient.load(keys / folder / f"{name}.key_secret", keys / "server.key")


async def _asks(client_curve: CurveClient | None, server_curve: CurveServer, timeout_s: float) -> bytes | None:
    """Send one message to an echo server with keys; its answer, or None when none comes."""
    loop = asyncio.get_running_loop()
    server = ZmqServerTransport(loop, "tcp://127.0.0.1:0", curve=server_curve)
    server.receive(lambda peer, payload: server.send(peer, payload) and None)
    client = ZmqClientTransport(loop, server.address, curve=client_curve)
    answer: asyncio.Future[bytes] = loop.create_future()
    client.receive(lambda payload: answer.done() or answer.set_result(payload))
    client.send(b"hello")
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        return None
    finally:
        client.close()
        server.close()
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, bytes | None]) -> bytes | None:
    return asyncio.run(work)


def test_a_client_with_a_known_key_is_served(keys: Path) -> None:
    assert run(_asks(client_keys(keys, "clients", "engine"), server_keys(keys), PATIENCE_S)) == b"hello"


def test_a_client_whose_key_is_not_in_the_list_is_not_served(keys: Path) -> None:
    assert run(_asks(client_keys(keys, "strangers", "stranger"), server_keys(keys), UNKNOWN_GETS_S)) is None


def test_a_client_without_keys_is_not_served(keys: Path) -> None:
    assert run(_asks(None, server_keys(keys), UNKNOWN_GETS_S)) is None


def test_an_impostor_with_another_key_is_not_believed_by_the_client(keys: Path) -> None:
    make_keys(keys / "other", "server")
    believes_other = CurveClient.load(keys / "clients" / "engine.key_secret", keys / "other" / "server.key")
    assert run(_asks(believes_other, server_keys(keys), UNKNOWN_GETS_S)) is None


def test_secret_files_are_private_and_names_are_never_written_over(keys: Path) -> None:
    assert (keys / "server.key_secret").stat().st_mode & 0o777 == 0o600
    before = (keys / "server.key_secret").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        make_keys(keys, "server")
    assert (keys / "server.key_secret").read_text() == before


def test_a_secret_that_others_can_read_is_refused(keys: Path) -> None:
    (keys / "server.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        server_keys(keys)


def test_files_that_are_no_keys_are_refused(keys: Path) -> None:
    (keys / "clients" / "broken.key").write_text("no key at all")
    with pytest.raises(ConfigError, match="no CURVE key file"):
        server_keys(keys)
    with pytest.raises(ConfigError, match="holds no secret key"):
        CurveServer.load(keys / "server.key", keys / "clients")
    with pytest.raises(ConfigError, match="cannot be read"):
        CurveServer.load(keys / "missing.key_secret", keys / "clients")
    (keys / "nobody").mkdir()
    with pytest.raises(ConfigError, match="nobody could ever connect"):
        CurveServer.load(keys / "server.key_secret", keys / "nobody")


def test_keys_do_not_show_in_repr(keys: Path) -> None:
    loaded = server_keys(keys)
    assert loaded.secret.decode() not in repr(loaded)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://10.0.0.1:1", "tcp://*:1", "tcp://example.org:1"])
def test_addresses_beyond_this_machine_need_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        check_address(address, with_keys=False)
    check_address(address, with_keys=True)
