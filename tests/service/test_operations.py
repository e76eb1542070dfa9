"""What an operator sees: health, status and metrics over HTTP, logs, and documents that say the same as the code."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcore.errors import ConfigError
from kvcore.operations import http, metrics
from kvcore.operations.http import HttpServer
from kvcore.operations.logs import JsonFormatter, TextFormatter

Serve = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def get(url: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_status_and_metrics_are_served(serve: Serve, directory: Path) -> None:
    server = serve("--l2", f"file://{directory}/kv")
    assert get(server.http + "/healthz") == (200, "ok\n")
    status = json.loads(get(server.http + "/status")[1])
    assert status["address"] == server.address
    assert status["stores"] == ["0.file"]
    code, text = get(server.http + "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert code == 200
    assert families["kvcore_engine_connected"].samples[0].value == 0
    assert families["kvcore_l1_capacity_bytes"].samples[0].value == 16 << 20
    assert families["kvcore_l2_away"].samples[0].labels == {"store": "0.file"}


def test_nothing_else_is_served(serve: Serve) -> None:
    server = serve()
    assert get(server.http + "/")[0] == 404
    assert get(server.http + "/status/../etc")[0] == 404
    assert get(server.http + "/status", "POST")[0] == 501
    assert get(server.http + "/healthz", "HEAD") == (200, "")


def test_a_server_whose_loop_does_not_answer_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWERS_IN_S", 0.1)
    loop = asyncio.new_event_loop()  # never runs
    server = HttpServer(loop, "127.0.0.1:0", lambda: None)  # type: ignore[arg-type, return-value]
    try:
        assert get(server.address + "/healthz")[0] == 503
    finally:
        server.close()
        loop.close()


def test_a_stopped_process_answers_when_it_goes_on(serve: Serve) -> None:
    server = serve()
    server.signal(signal.SIGSTOP)
    host, port = server.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        server.signal(signal.SIGCONT)
        assert b"200" in client.recv(100)


def test_a_closed_or_silent_client_costs_the_server_nothing(serve: Serve) -> None:
    server = serve()
    host, port = server.http.removeprefix("http://").split(":")
    silent = socket.create_connection((host, int(port)))
    for _ in range(20):
        socket.create_connection((host, int(port))).close()
    assert get(server.http + "/healthz") == (200, "ok\n")
    silent.close()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.1:80", "example.org:80", "127.0.0.1", "127.0.0.1:http"])
def test_http_beyond_this_machine_or_without_a_port_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.listen"):
        HttpServer(None, listen, lambda: None)  # type: ignore[arg-type]


def test_the_documented_metrics_are_the_metrics_there_are() -> None:
    document = (ROOT / "docs" / "metrics.md").read_text()
    assert metrics.markdown() in document


def test_names_carry_their_units_and_no_metric_is_labelled_by_salt() -> None:
    for metric in metrics.METRICS:
        assert metric.name.startswith("kvcore_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.unit == "bytes") == ("bytes" in metric.name)
        assert "salt" not in metric.labels
    names = [metric.name for metric in metrics.METRICS]
    assert len(set(names)) == len(names)


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "kvcore.json").read_text())
    asked = set(re.findall(r"kvcore_[a-z0-9_]+", json.dumps(dashboard["panels"])))
    assert asked <= {metric.name for metric in metrics.METRICS}
    assert len(asked) > 15


def record(**more: Any) -> logging.LogRecord:
    made = logging.LogRecord("kvcore.server", logging.INFO, "file", 1, "serving %s", ("m",), None)
    made.__dict__.update(more)
    return made


def test_a_json_log_line_is_one_object_with_its_fields() -> None:
    line = JsonFormatter().format(record(fields={"ranks": 2}))
    found = json.loads(line)
    assert "\n" not in line
    assert found["text"] == "serving m"
    assert (found["level"], found["component"], found["ranks"]) == ("info", "kvcore.server", 2)
    assert found["time"].endswith("Z")


def test_a_text_log_line_reads_like_one() -> None:
    assert TextFormatter().format(record(fields={"ranks": 2})).endswith("INFO kvcore.server: serving m ranks=2")


def test_logs_are_json_when_asked_for(serve: Serve, directory: Path, patient: dict[str, str]) -> None:
    (directory / "mount").write_text("in the way")
    server = serve("--log-format", "json", "--l2", f"file://{directory}/mount/kv", environ=patient)
    assert server.stop() == 0  # it has said everything
    lines = [json.loads(line) for line in server.text.splitlines()]
    assert any(line["level"] == "warning" and "does not answer" in line["text"] for line in lines)
