"""Disk stores, driven one batch at a time; and file systems that really fail.

`stores` opens adapters of any kind on a directory, on one loop, and closes them with the test. `mounts` mounts a
tmpfs of some size, or a layer of our own (`layer.py`) that answers EIO or takes its time; both need root, the layer
/dev/fuse and mfusepy too. Where that is missing the tests are skipped in one loud line.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import select
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvcore.l2 import fs, slab
from kvcore.l2.file import FileBackend
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.shared import SharedAdapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.files import OsFiles
from kvcore.runtime.notice import EventfdNotice

PATIENCE_S = 60.0
CAPACITY_BYTES = 4 << 20
SLAB_BYTES = 1 << 20
CONTENT = runpy.run_path(str(Path(__file__).with_name("content.py")))


class Session:
    """One adapter. Every call waits for its notice, at most `PATIENCE_S`."""

    def __init__(self, runner, kind, directory, capacity_bytes, quota, options):
        self.runner = runner
        self.kind = kind
        self.directory = Path(directory)
        self.loop = runner.get_loop()
        self.executor = ThreadExecutor(self.loop, 2)
        self.wake = asyncio.Event()
        self.open = True
        try:
            self.adapter = self._adapter(capacity_bytes, quota, options)
        except BaseException:
            self.executor.close()
            raise
        for notice in (self.adapter.store_notice, self.adapter.lookup_notice, self.adapter.load_notice):
            notice.subscribe(self.wake.set)

    def _adapter(self, capacity_bytes, quota, options):
        shared = (self.executor, lambda: EventfdNotice(self.loop))
        directory = str(self.directory)
        if self.kind == "fs":
            self.backend = fs.open_backend(fs.FsOptions(directory, **options))
            return SharedAdapter("disk", self.backend, *shared, SystemClock(), capacity_bytes, quota)
        if self.kind == "slab":
            capacity_bytes = CAPACITY_BYTES if capacity_bytes is None else capacity_bytes
            options = {"slab_bytes": SLAB_BYTES, **options}
            self.backend = slab.open_backend(slab.SlabOptions(directory, capacity_bytes, **options))
        else:
            self.backend = FileBackend(OsFiles(directory, **options), SystemClock().token(8), "the directory")
        return IndexedAdapter("disk", self.backend, *shared, capacity_bytes, quota=quota)

    def store(self, *items):
        """Items are (key, bytes); the answers' names."""
        keys, payloads = zip(*items)
        task = self.adapter.submit_store(keys, [memoryview(payload) for payload in payloads])
        answers = {}
        self.until(lambda: answers.update(self.adapter.pop_completed_stores()) or task in answers)
        return [answer.value for answer in answers[task]]

    def load(self, *items):
        """Items are (key, size); the bytes of each, or None."""
        buffers = [bytearray(b"\xee" * size) for _, size in items]
        task = self.adapter.submit_load([key for key, _ in items], [memoryview(buffer) for buffer in buffers])
        bits = self.until(lambda: self.adapter.take_load(task))
        return [bytes(buffer) if bits >> position & 1 else None for position, buffer in enumerate(buffers)]

    def lookup(self, *keys):
        task = self.adapter.submit_lookup_and_lock(keys)
        bits = self.until(lambda: self.adapter.take_lookup(task))
        return [bool(bits >> position & 1) for position in range(len(keys))]

    def unlock(self, *keys):
        self.adapter.submit_unlock(keys)

    def delete(self, *keys):
        self.adapter.delete(keys)
        self.rest()

    def rest(self):
        """Background work has ended: deletions, discards, the scan of a shared store."""
        while self.adapter.work_inflight:
            self.executor.submit(lambda: None, lambda outcome: self.wake.set())
            self.until(lambda: True if self.wake.is_set() else None, fresh=True)

    def until(self, take, fresh=False):
        async def wait():
            if fresh:
                await self.wake.wait()
            while (result := take()) is None or result is False:
                self.wake.clear()
                if (result := take()) is not None and result is not False:
                    break
                await self.wake.wait()
            self.wake.clear()
            return result

        return self.runner.run(asyncio.wait_for(wait(), PATIENCE_S))

    @property
    def statistics(self):
        return self.adapter.statistics()

    def close(self):
        if self.open:
            self.open = False
            self.adapter.close()
            self.executor.close()


@pytest.fixture
def stores(tmp_path):
    """`stores(kind, directory=..., capacity_bytes=..., quota=..., **options of the kind)`: an open `Session`."""
    opened = []
    with asyncio.Runner() as runner:

        def make(kind, directory=tmp_path / "store", capacity_bytes=None, quota=None, **options):
            opened.append(Session(runner, kind, directory, capacity_bytes, quota, options))
            return opened[-1]

        yield make
        for session in opened:
            session.close()


@pytest.fixture(scope="session")
def key():
    """`key(number, salt="")`: an `ObjectKey`."""
    return CONTENT["key"]


@pytest.fixture(scope="session")
def content():
    """`content(number, size)`: the bytes that belong under `key(number)`."""
    return CONTENT["content"]


def skip_loudly(reason):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn(f"{reason}: real faults of a disk are not tested", stacklevel=2)
    pytest.skip(reason)


class Mounts:
    """What this test has mounted, undone in reverse."""

    def __init__(self, base, needs):
        self.base = base
        self.needs = needs
        self.undo = []

    def _point(self, name):
        point = self.base / name
        point.mkdir()
        return point

    def _mount(self, point, *arguments):
        if os.geteuid() != 0:
            skip_loudly("mounting needs root")
        result = subprocess.run(["mount", *arguments, str(point)], check=False, capture_output=True, text=True)
        if result.returncode:
            skip_loudly(f"mount {' '.join(arguments)}: {result.stderr.strip()}")
        self.undo.append(lambda: subprocess.run(["umount", "-l", str(point)], check=True))
        return point

    def tmpfs(self, size):
        """A file system of `size` bytes, in memory."""
        return self._mount(self._point("tmpfs"), "-t", "tmpfs", "-o", f"size={size}", "kvcore-test")

    def read_only(self, source):
        """The same files once more, where nothing can be written."""
        point = self._mount(self._point("read-only"), "--bind", str(source))
        subprocess.run(["mount", "-o", "remount,bind,ro", str(point)], check=True)
        return point

    def layer(self, source):
        """`source` once more, through a process that fails and delays as it is told. See `Layer`."""
        if not Path("/dev/fuse").exists() or os.geteuid() != 0:
            skip_loudly("a faulty file system needs /dev/fuse and root")
        self.needs("mfusepy")
        made = Layer(source, self._point("layer"))
        self.undo.append(made.close)
        return made


class Layer:
    """The process behind a mount. `path` is the mount point."""

    def __init__(self, source, point):
        self.path = point
        script = Path(__file__).with_name("layer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(source), str(point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            self.process.kill()
            self.process.wait()
            skip_loudly("a faulty file system needs libfuse")

    def tell(self, fault):
        """`write EIO`, `read EIO`, `read delay 60`, ... one fault at a time; empty: none. In force on return; who still
        waits because of the one before goes on."""
        self.process.stdin.write(fault + "\n")
        self.process.stdin.flush()
        assert self._line() == "ok"

    def _line(self):
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the layer does not answer"
        return self.process.stdout.readline().strip()

    def close(self):
        subprocess.run(["umount", "-l", str(self.path)], check=False)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def mounts(tmp_path, needs):
    made = Mounts(tmp_path, needs)
    yield made
    for undo in reversed(made.undo):
        undo()
