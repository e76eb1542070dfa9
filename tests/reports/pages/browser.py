"""A headless Chromium, driven over its pipe: what the tests of the pages look through.

Theory of operation
-------------------
Chromium speaks the DevTools protocol (chromedevtools.github.io/devtools-protocol) over two inherited file descriptors,
3 for commands and 4 for answers and events, JSON with a zero byte after each message (`--remote-debugging-pipe`). So no
port is opened and nothing but the standard library is needed.

`Page` counts what a page must not do: console errors, exceptions, requests other than for its own file.

Who holds: the test holds the browser by `with`; who frees: the exit, which ends the process and its profile.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0  # a loaded machine takes ten seconds to start a browser
_ABOVE = 10  # both ends of the pipes must not be 3 or 4 themselves
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    """The path of a Chromium; CHROMIUM names one."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process with one tab. See the module text."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._write = _pipe()
        self._read, writes = _pipe()
        command = [
            *(sys.executable, "-S", "-c", _START, str(reads), str(writes)),
            *(path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,900"),
            *(f"--user-data-dir={self._profile.name}", "about:blank"),
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        self._buffer = b""
        self._serial = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        try:
            pages = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
            target = pages[0]["targetId"] if pages else self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """One command; events that come before its answer are kept."""
        self._serial += 1
        message: dict[str, Any] = {"id": self._serial, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._serial:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer in {ANSWER_S:g} s"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    # ---- what a test asks

    def open(self, file: Path) -> None:
        """Load a page from disk and wait until its code has run."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + ANSWER_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(deadline))
        assert self.run("document.body.dataset.ready") == "yes", self.complaints()

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, selector: str, value: float) -> None:
        """Set a control and tell the page, as a hand would."""
        self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.value = {json.dumps(value)};"
            " it.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    def point(self, selector: str) -> None:
        """Move the pointer over the middle of an element."""
        box = self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)});"
            " it.scrollIntoView({block: 'center'});"
            " const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Console errors, exceptions, failed loads and refused requests since `open`."""
        found = []
        for event in self.events:
            method, params = event.get("method", ""), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for since `open`, the page's own left out."""
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return asked[1:]


def _pipe() -> tuple[int, int]:
    """(read, write), both above the descriptors that the browser takes."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
        os.close(end)
    return ends[0], ends[1]
