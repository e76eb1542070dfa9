"""Paged KV in shared memory: what a worker does to its segment never reaches the server but as a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcore.errors import CallerError, ConfigError, PeerError
from kvcore.runtime.populate import PIECE_BYTES, Populating
from kvcore.runtime.shared_memory import SharedArena
from kvcore.runtime.worker_pages import OpenedPages, SharedPages
from kvcore.service.page_shares import PageRegistry, describe
from kvcore.service.remote import MappedSegments
from kvcore.service.shapes import PageGroup

SIZE = 10_000
PATIENCE_S = 60.0


@pytest.fixture
def shared() -> Iterator[SharedPages]:
    pages = SharedPages(SIZE)
    yield pages
    pages.close()


def path(pages: SharedPages) -> Path:
    return Path("/dev/shm") / pages.segment


def test_both_sides_see_the_same_bytes(shared: SharedPages) -> None:
    shared.buffer[100:104] = b"abcd"
    server = OpenedPages(shared.segment, SIZE)
    into = bytearray(4)
    assert server.read(100, memoryview(into))
    assert server.write(9_996, memoryview(b"wxyz"))
    assert (bytes(into), bytes(shared.buffer[9_996:])) == (b"abcd", b"wxyz")
    server.close()
    server.close()
    assert path(shared).exists(), "a living worker keeps its name"


def test_the_segment_is_private_and_goes_with_its_maker() -> None:
    pages = SharedPages(SIZE)
    assert path(pages).stat().st_mode & 0o777 == 0o600
    name = path(pages)
    tensor = np.frombuffer(pages.buffer, dtype=np.uint8)
    pages.close()
    pages.close()
    assert not name.exists()
    assert tensor[0] == 0, "views keep the memory"


def test_a_segment_that_was_cut_short_is_a_refusal_and_the_server_lives(shared: SharedPages) -> None:
    server = OpenedPages(shared.segment, SIZE)
    os.truncate(path(shared), 4096)
    into = memoryview(bytearray(100))
    assert server.read(0, into)
    assert not server.read(4050, into), "short in the middle"
    assert not server.read(8000, into)
    assert not server.write(0, into)
    assert path(shared).stat().st_size == 4096, "and it does not grow by what we do"
    os.truncate(path(shared), 2 * SIZE)
    assert server.read(8000, into)
    assert not server.write(0, into), "another size than was checked"
    server.close()


def test_segments_that_are_not_what_they_should_be_are_refused(shared: SharedPages) -> None:
    with pytest.raises(PeerError, match="not 10001"):
        OpenedPages(shared.segment, SIZE + 1)
    with pytest.raises(PeerError, match="No such file"):
        OpenedPages("kvcore-0000000000000000", SIZE)
    for name in ("../etc/passwd", "kvcore-a/b", "passwd", "kvcore-" + "a" * 64):
        with pytest.raises(CallerError):
            OpenedPages(name, SIZE)
    path(shared).chmod(0o640)
    with pytest.raises(PeerError, match="open to other users"):
        OpenedPages(shared.segment, SIZE)


def test_a_link_or_a_pipe_of_that_name_is_refused(tmp_path: Path) -> None:
    for number, make in enumerate((lambda at: at.symlink_to("/etc/hostname"), lambda at: os.mkfifo(at, 0o600))):
        name = f"kvcore-{os.getpid()}-{number}"
        at = Path("/dev/shm") / name
        make(at)
        try:
            with pytest.raises(PeerError):
                OpenedPages(name, 0)
        finally:
            at.unlink()


def test_the_name_of_a_worker_that_was_killed_goes_when_the_server_closes_its_pages() -> None:
    code = (
        "from kvcore.runtime.worker_pages import SharedPages\n"
        "pages = SharedPages(4096); print(pages.segment, flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        segment = child.stdout.readline().strip()
        server = OpenedPages(segment, 4096)
        child.kill()
    assert (Path("/dev/shm") / segment).exists()
    server.close()
    assert not (Path("/dev/shm") / segment).exists()


def test_pages_describe_themselves_as_they_lie_in_their_buffer() -> None:
    buffer = np.zeros((6, 50), dtype=np.uint32)
    pages = [buffer[:, :40].reshape(6, 2, 4, 5), buffer[:, :10].reshape(6, 1, 1, 10), buffer[2:3, 20:30]]
    described = describe("kvcore-x", buffer, pages)
    assert described.size == 1200
    assert described.groups == (PageGroup(0, 6, 200, 160), PageGroup(0, 6, 200, 40), PageGroup(480, 1, 40, 40))
    assert describe("kvcore-x", buffer, [buffer[:2, :40]]).groups == (PageGroup(0, 2, 200, 160),)
    with pytest.raises(ConfigError, match="group 0 do not lie in shared memory"):
        describe("kvcore-x", buffer[:3], [buffer])  # begins in it and ends behind it
    with pytest.raises(ConfigError, match="group 1 do not lie in shared memory"):
        describe("kvcore-x", buffer, [buffer, np.zeros((3, 4))])
    with pytest.raises(ConfigError, match="group 0"):
        describe("kvcore-x", buffer, [np.moveaxis(buffer.reshape(6, 5, 10), 1, 2)])


def test_a_registry_opens_what_was_shared_in_it_and_nothing_else() -> None:
    registry, buffer = PageRegistry(), bytearray(b"abcdef")
    registry.share("mine", buffer)
    pages = registry.open("mine", 6)
    into = bytearray(2)
    assert pages.read(1, memoryview(into))
    assert pages.write(4, memoryview(b"XY"))
    assert (bytes(into), bytes(buffer)) == (b"bc", b"abcdXY")
    for name, size in (("other", 6), ("mine", 5)):
        with pytest.raises(PeerError):
            registry.open(name, size)


# -- populating


def test_a_mapping_is_populated_in_the_background_and_keeps_its_bytes() -> None:
    arena = SharedArena(3 * PIECE_BYTES + 4096)
    segments = MappedSegments()
    arena.buffer[PIECE_BYTES] = 7
    mapped = segments(arena.segment)
    populating = segments._mapped[arena.segment][1]
    assert populating.wait(PATIENCE_S)
    assert segments.populated
    assert mapped.view_range(PIECE_BYTES, 1)[0] == 7
    if populating.bytes_done:  # the kernel knows it
        assert populating.bytes_done == arena.capacity_bytes
        assert resident_kib(arena.segment) >= (arena.capacity_bytes >> 10) - 64
    segments.close()
    arena.close()


def test_a_populating_thread_ends_when_it_is_stopped() -> None:
    arena = SharedArena(64 * PIECE_BYTES)
    populating = Populating(arena.buffer)
    populating.stop()
    assert populating.wait(PATIENCE_S)
    assert populating.bytes_done <= arena.capacity_bytes
    arena.close()


def resident_kib(segment: str) -> int:
    """Pages of the segment in this process's page table, over all its mappings."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            found = segment in line
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total
