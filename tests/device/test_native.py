"""The compiled copies, byte for byte: the CPU path, and the CUDA source with every block and thread run on the CPU.

Truth are numpy's strided views, for planes drawn at random; `test_native_layouts.py` has the layouts of engines.
Outputs are poisoned, and the whole memory is compared, so a byte that was not written shows as much as one written
beside its place. `test_native_sanitized.py` runs this file again under sanitizers, and with planted bugs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from kvcore.device.native import CopyBatch, CpuKernels, CudaCall, PlaneTable
from kvcore.device.planes import KVPlanes, Plane
from kvcore.errors import CallerError, ConfigError


@cache
def native() -> ModuleType:
    """native_backends.py, from beside this file."""
    path = Path(__file__).with_name("native_backends.py")
    specification = importlib.util.spec_from_file_location("kvcore_native_backends", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


if shutil.which("g++") is None:
    pytest.skip("NOT CHECKED: no C++ compiler (g++), so the compiled copies cannot be built", allow_module_level=True)

PLANTED = "KVCORE_TEST_KERNELS" in os.environ  # a bug is there, and whether it is found is all that matters
PHASES = tuple(phase for phase in Phase if not (PLANTED and phase in {Phase.shrink, Phase.explain}))
SANITIZED = "KVCORE_TEST_SANITIZER" in os.environ  # everything takes five times as long
SLOW_MACHINE = settings(
    deadline=None,
    max_examples=25 if SANITIZED else 60,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=PLANTED,
)


@cache
def backends() -> Any:
    return native().backends()


@st.composite
def planes(draw: st.DrawFn, block_tokens: int, num_blocks: int) -> Plane:
    """Levels in any order of strides, with gaps; sizes that no vector divides; a base that is aligned to nothing."""
    separable = draw(st.booleans())
    sizes = {
        "outer": draw(st.integers(1, 4)),
        "token": block_tokens if separable else draw(st.integers(1, 3)),
        "block": num_blocks,
    }
    unit = draw(st.sampled_from([1, 2, 4, 8, 16, 16]))
    run = unit * draw(st.integers(1, 40))
    strides, covered = {}, run
    for level in draw(st.permutations(sorted(sizes))):
        strides[level] = covered + draw(st.sampled_from([0, 0, 0, unit]))
        covered = strides[level] * sizes[level]
    base = unit * draw(st.integers(0, 3)) % 64
    return Plane(
        base, strides["block"], sizes["outer"], strides["outer"], sizes["token"], strides["token"], run, separable
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Planes, chunks in an order of their own, skips that these planes allow."""
    block_tokens, num_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    drawn = draw(st.lists(planes(block_tokens, num_blocks), min_size=1, max_size=3))
    blocks_per_chunk = draw(st.integers(1, num_blocks))
    chunks = draw(st.integers(1, num_blocks // blocks_per_chunk))
    order = draw(st.permutations(range(num_blocks)))
    unit = 1 if all(plane.token_separable for plane in drawn) else block_tokens
    skips = st.integers(0, blocks_per_chunk * block_tokens // unit).map(lambda count: count * unit)
    return {
        "planes": drawn,
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "ids": np.array(order[: chunks * blocks_per_chunk]).reshape(chunks, blocks_per_chunk),
        "skips": draw(st.lists(skips, min_size=chunks, max_size=chunks)),
        "shift": draw(st.sampled_from([0, 0, 1, 2, 4, 8, 16])),
        "seed": draw(st.integers(0, 2**32)),
    }


# A block of several rounds of a kernel's tile, so that tiles, vectors and threads have seams inside it.
LARGE = {
    "planes": [
        Plane(0, 5 * 70_016, 2, 35_008, 2, 17_504, 17_504),
        Plane(3, 40_001, 1, 0, 2, 20_000, 19_999),
    ],
    "num_blocks": 3,
    "block_tokens": 2,
    "ids": np.array([[2, 0]]),
    "skips": [3],
    "shift": 0,
    "seed": 1,
}
# Everything but the runs is a multiple of 16 bytes: a vector of 16 would cross the end of a run.
RUNS_OF_24 = {**LARGE, "planes": [Plane(0, 64, 2, 32, 2, 64 * 3, 24)], "skips": [0]}


@SLOW_MACHINE
@given(case=cases())
@example(case=LARGE)
@example(case=RUNS_OF_24)
def test_bytes_of_a_gather_are_those_of_strided_views(case: dict[str, Any]) -> None:
    kit = native()
    pages = kit.pages_of(case["planes"], case["num_blocks"], case["block_tokens"], case["seed"])
    before = [memory.bytes.copy() for memory in pages.memory]
    expected = [kit.gathered(pages, row) for row in case["ids"]]
    for name, backend in backends().items():
        chunks = kit.chunks_of(len(case["ids"]), len(expected[0]), case["shift"])
        backend.gather(kit.batch_of(pages.planes, case["ids"], chunks))
        assert all(np.array_equal(chunk.bytes, wanted) for chunk, wanted in zip(chunks, expected, strict=True)), name
    assert all(np.array_equal(memory.bytes, old) for memory, old in zip(pages.memory, before, strict=True))


@SLOW_MACHINE
@given(case=cases())
@example(case=LARGE)
@example(case=RUNS_OF_24)
def test_bytes_of_a_scatter_are_those_of_strided_views(case: dict[str, Any]) -> None:
    kit = native()
    truth = kit.pages_of(case["planes"], case["num_blocks"], case["block_tokens"], case["seed"])
    chunks = kit.chunks_of(len(case["ids"]), truth.planes.chunk_bytes(case["ids"].shape[1]), case["shift"])
    source = np.random.default_rng(case["seed"] + 1)
    for row, chunk, skip in zip(case["ids"], chunks, case["skips"], strict=True):
        chunk.bytes[:] = source.integers(0, 256, len(chunk.bytes), np.uint8)
        kit.scattered(truth, row, chunk.bytes, skip)
    for name, backend in backends().items():
        pages = kit.pages_of(case["planes"], case["num_blocks"], case["block_tokens"], case["seed"])
        backend.scatter(kit.batch_of(pages.planes, case["ids"], chunks, skip_tokens=case["skips"]))
        for memory, expected in zip(pages.memory, truth.memory, strict=True):
            assert np.array_equal(memory.bytes, expected.bytes), name


@SLOW_MACHINE
@given(case=cases(), data=st.data())
def test_bytes_moved_layer_by_layer_are_those_of_one_move(case: dict[str, Any], data: st.DataObject) -> None:
    kit = native()
    pages = kit.pages_of(case["planes"], case["num_blocks"], case["block_tokens"], case["seed"])
    blocks, whole = case["ids"].shape[1], len(pages.planes.planes)
    expected = [kit.gathered(pages, row) for row in case["ids"]]
    cut = data.draw(st.integers(1, whole), label="planes of the first slice")
    for name, backend in backends().items():
        chunks = kit.chunks_of(len(case["ids"]), len(expected[0]), case["shift"])
        for first, last in [(0, cut), (cut, whole)] if cut < whole else [(0, whole)]:
            part, offset = pages.planes.part(first, last, blocks)
            backend.gather(kit.batch_of(part, case["ids"], chunks, chunk_offset_bytes=offset))
            written = offset + part.chunk_bytes(blocks)
            assert all((chunk.bytes[written:] == kit.POISON).all() for chunk in chunks), name
        assert all(np.array_equal(chunk.bytes, wanted) for chunk, wanted in zip(chunks, expected, strict=True)), name


# ---- what is refused before anything moves -------------------------------------------------------------------------


DENSE = Plane(0, 64, 1, 0, 4, 16, 16)
STATE = Plane(0, 64, 1, 0, 1, 64, 64, False)


def refused(name: str, scatter: bool, ids: Any, *, planes: Any = (DENSE,), room: int = 0, **more: Any) -> str:
    """What the call says; nothing may have been written and nothing launched."""
    kit = native()
    pages = kit.pages_of(planes, 4, 4, 7)
    before = [memory.bytes.copy() for memory in pages.memory]
    chunks = kit.chunks_of(len(ids), room or pages.planes.chunk_bytes(len(ids[0])))
    backend = backends()[name]
    with pytest.raises(CallerError) as caught:
        (backend.scatter if scatter else backend.gather)(kit.batch_of(pages.planes, np.array(ids), chunks, **more))
    assert all((chunk.bytes == kit.POISON).all() for chunk in chunks)
    assert all(np.array_equal(memory.bytes, old) for memory, old in zip(pages.memory, before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("name", ["cpu", "kernel", "direct"])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("bad", [-1, 4, 2**31, 2**62, -(2**63)])
def test_a_block_that_does_not_exist_is_refused_before_anything_moves(name: str, scatter: bool, bad: int) -> None:
    assert f"block id {bad} (entry 3) does not exist" in refused(name, scatter, [[0, 1], [2, bad]])


@pytest.mark.parametrize("name", ["cpu", "kernel", "direct"])
def test_two_writers_of_one_block_are_refused(name: str) -> None:
    assert "block 3 stands twice" in refused(name, True, [[0, 3], [3, 1]])


def test_a_block_that_is_skipped_whole_may_stand_twice() -> None:
    kit = native()
    pages = kit.pages_of([DENSE], 4, 4, 7)
    chunks = kit.chunks_of(2, pages.planes.chunk_bytes(2))
    backends()["cpu"].scatter(kit.batch_of(pages.planes, np.array([[0, 3], [0, 1]]), chunks, skip_tokens=[4, 5]))
    assert (pages.views[0][3] == kit.POISON).all()
    assert (pages.views[0][1][:, 1:] == kit.POISON).all()


@pytest.mark.parametrize("name", ["cpu", "kernel", "direct"])
def test_a_chunk_without_room_is_refused(name: str) -> None:
    assert "room for 128 bytes" in refused(name, False, [[0, 1]], room=127)
    assert "room for 192 bytes" in refused(name, False, [[0, 1]], room=191, chunk_offset_bytes=64)


@pytest.mark.parametrize("name", ["cpu", "kernel", "direct"])
def test_skips_that_cannot_be_are_refused(name: str) -> None:
    assert "cannot skip 9 tokens" in refused(name, True, [[0, 1]], skip_tokens=[9])
    assert "cannot skip -1 tokens" in refused(name, True, [[0, 1]], skip_tokens=[-1])
    said = refused(name, True, [[0, 1], [2, 3]], planes=(DENSE, STATE), skip_tokens=[4, 3])
    assert said == "chunk 1 skips tokens inside a block, and plane 1 can only be skipped by whole blocks"


def test_chunks_of_one_gather_that_overlap_are_refused() -> None:
    kit = native()
    pages = kit.pages_of([DENSE], 4, 4, 7)
    room = kit.Memory(200)
    batch = CopyBatch(PlaneTable(pages.planes), [[0, 1], [2, 3]], [room.address, room.address + 72], 128)
    with pytest.raises(CallerError, match="overlap"):
        backends()["cpu"].gather(batch)
    assert (room.bytes == kit.POISON).all()


@pytest.mark.parametrize(
    ("column", "value", "field"),
    [
        (0, 0, "base"),
        (1, 8, "block_stride"),
        (2, 0, "outer_count"),
        (2, 2**62, "outer_stride"),
        (4, 0, "tokens"),
        (4, 2**40, "2 GiB"),
        (5, 8, "token_stride"),
        (6, 0, "run_bytes"),
        (6, -16, "run_bytes"),
    ],
)
def test_a_plane_that_cannot_be_is_refused(column: int, value: int, field: str) -> None:
    kit = native()
    pages = kit.pages_of([DENSE, DENSE], 4, 4, 7)
    chunks = kit.chunks_of(1, 4096)
    table = PlaneTable(pages.planes)
    table.rows[1, column] = value
    batch = CopyBatch(table, [[0]], [chunks[0].address], 4096)
    for name in ("cpu", "kernel", "direct"):
        with pytest.raises(CallerError, match=f"plane 1 .*{field}"):
            backends()[name].gather(batch)


@pytest.mark.parametrize(
    ("ids", "chunks", "skips"),
    [([0, 1], [1, 2], None), ([[0.5]], [1], None), ([[0]], [1, 2], None), ([[0]], [1], [1, 2]), ([[0]], [1], [[1]])],
)
def test_arguments_of_the_wrong_shape_are_refused(ids: Any, chunks: Any, skips: Any) -> None:
    table = PlaneTable(KVPlanes((Plane(64, 64, 1, 0, 4, 16, 16),), 4, 4))
    with pytest.raises(CallerError):
        CopyBatch(table, ids, chunks, 64, skip_tokens=skips)


@pytest.mark.parametrize("ids", [np.zeros((0, 2), np.int64), np.zeros((2, 0), np.int64)])
def test_an_empty_batch_is_refused(ids: Any) -> None:
    table = PlaneTable(KVPlanes((Plane(64, 64, 1, 0, 4, 16, 16),), 4, 4))
    with pytest.raises(CallerError):
        backends()["cpu"].gather(CopyBatch(table, ids, [64] * len(ids), 64))


def test_a_workspace_that_is_too_small_or_misaligned_is_refused() -> None:
    kit = native()
    pages = kit.pages_of([DENSE], 4, 4, 7)
    chunks = kit.chunks_of(1, 64)
    batch = kit.batch_of(pages.planes, np.array([[0]]), chunks)
    kernels = kit.Emulated(small=False).kernels
    size = kernels.workspace_bytes(batch)
    room = kit.Memory(size + 16)
    for call in (
        CudaCall(0, 0),
        CudaCall(0, 0, room.address, room.address, size - 1),
        CudaCall(0, 0, room.address + 8, room.address, size),
        CudaCall(0, 0, room.address, room.address + 1, size),
    ):
        with pytest.raises(CallerError, match=f"workspace must have {size} bytes"):
            kernels.gather(batch, call)
    assert (chunks[0].bytes == kit.POISON).all()


# ---- the shape of the work -----------------------------------------------------------------------------------------


def test_many_chunks_are_one_launch_and_every_thread_of_it_runs() -> None:
    kit = native()
    plane = Plane(0, 32_768, 1, 0, 16, 2048, 2048)
    pages = kit.pages_of([plane] * 3, 40, 16, 7)
    ids = np.random.default_rng(1).permutation(40).reshape(10, 4)
    chunks = kit.chunks_of(10, pages.planes.chunk_bytes(4))
    emulated = kit.Emulated(small=False)
    emulated.processors = 7
    emulated.statistics()
    emulated.gather(kit.batch_of(pages.planes, ids, chunks))
    moved = 3 * 40 * 32_768
    assert emulated.statistics() == {
        "launches": 1,
        "blocks": 28,
        "threads": 28 * 256,
        "loads": moved // 16,
        "stores": moved // 16,
    }


@pytest.mark.parametrize(
    ("plane", "width"),
    [
        (Plane(0, 64, 1, 0, 4, 16, 16), 16),
        (Plane(8, 64, 1, 0, 4, 16, 16), 8),
        (Plane(0, 72, 1, 0, 4, 16, 16), 8),
        (Plane(4, 64, 1, 0, 4, 16, 16), 4),
        (Plane(0, 264, 1, 0, 4, 66, 64), 2),
        (Plane(0, 52, 1, 0, 4, 13, 13), 4),
        (Plane(0, 3, 1, 0, 1, 3, 3, False), 1),
    ],
)
def test_vectors_are_as_wide_as_the_plane_allows(plane: Plane, width: int) -> None:
    kit = native()
    pages = kit.pages_of([plane], 4, 4, 7)
    chunks = kit.chunks_of(1, pages.planes.chunk_bytes(2))
    emulated = kit.Emulated(small=False)
    emulated.statistics()
    emulated.gather(kit.batch_of(pages.planes, np.array([[2, 1]]), chunks))
    assert emulated.statistics()["loads"] == 2 * plane.share_bytes // width


def test_neighbouring_blocks_of_a_dense_plane_are_one_run() -> None:
    kit = native()
    kernels = CpuKernels(kit.library("copy_cpu.cpp", small=False))
    pages = kit.pages_of([DENSE, Plane(0, 80, 1, 0, 4, 16, 16)], 8, 4, 7)
    chunks = kit.chunks_of(1, pages.planes.chunk_bytes(5))
    batch = kit.batch_of(pages.planes, np.array([[4, 5, 6, 1, 2]]), chunks, skip_tokens=[5])
    assert kernels.runs(batch, scatter=False)[:, 2].tolist() == [192, 128, 64, 64, 64, 64, 64]
    runs = kernels.runs(batch, scatter=True)
    assert runs[:, 2].tolist() == [48 + 64, 128, 48, 64, 64, 64]
    first = [pages.planes.planes[0].base + 5 * 64 + 16, chunks[0].address + 80, 112]
    assert runs[0].tolist() == first


def test_a_missing_or_strange_library_is_told_at_loading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        CpuKernels(tmp_path / "nothing.so")
    (tmp_path / "strange.so").write_bytes(b"\x7fELF")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        CpuKernels(tmp_path / "strange.so")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.device.native.ABI", 2)
    with pytest.raises(ConfigError, match="version 1 of the interface, not 2"):
        CpuKernels(native().library("copy_cpu.cpp", small=False))
