"""The layouts of engines: every format x operation x backend, bit-equal to the torch reference."""

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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="NOT CHECKED: the layouts of engines are torch tensors")

from kvcore.device import reference  # noqa: E402
from kvcore.device.discover import PagedKV, normalize_kv_and_discover_format  # noqa: E402
from kvcore.device.examples import EXAMPLES, Shape, build  # noqa: E402
from kvcore.device.native import CopyBatch, PlaneTable  # noqa: E402

if shutil.which("g++") is None:
    pytest.skip("NOT CHECKED: no C++ compiler (g++), so the compiled copies cannot be built", allow_module_level=True)


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


@cache
def backends() -> Any:
    return native().backends()


DTYPES = ["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"]
SANITIZED = "KVCORE_TEST_SANITIZER" in os.environ  # everything takes five times as long
SETTINGS = settings(deadline=None, max_examples=2 if SANITIZED else 8, suppress_health_check=[HealthCheck.too_slow])

shapes = st.builds(
    Shape,
    layers=st.integers(1, 3),
    blocks=st.integers(2, 9),
    tokens=st.sampled_from([1, 3, 4, 16, 17]),
    heads=st.integers(1, 5),
    size=st.sampled_from([1, 2, 5, 8, 33, 64]),
    dtype=st.sampled_from(DTYPES),
)


def discovered(name: str, shape: Shape) -> PagedKV:
    made = build(name, shape)
    return normalize_kv_and_discover_format(made.kv, made.hints)


def drawn_ids(data: st.DataObject, num_blocks: int) -> Any:
    per_chunk = data.draw(st.integers(1, num_blocks), label="blocks per chunk")
    chunks = data.draw(st.integers(1, num_blocks // per_chunk), label="chunks")
    order = data.draw(st.permutations(range(num_blocks)), label="blocks")
    return np.array(order[: chunks * per_chunk]).reshape(chunks, per_chunk)


def drawn_skips(data: st.DataObject, kv: PagedKV, ids: Any) -> list[int]:
    unit = 1 if kv.planes.token_separable else kv.planes.block_tokens
    most = ids.shape[1] * kv.planes.block_tokens // unit
    return [data.draw(st.integers(0, most), label="skip") * unit for _ in ids]


def chunks_of(kv: PagedKV, ids: Any) -> list[Any]:
    return [torch.full((kv.planes.chunk_bytes(ids.shape[1]),), 0xA5, dtype=torch.uint8) for _ in ids]


def batch_of(kv: PagedKV, ids: Any, chunks: list[Any], **more: Any) -> CopyBatch:
    addresses = [chunk.data_ptr() for chunk in chunks]
    return CopyBatch(PlaneTable(kv.planes), ids, addresses, len(chunks[0]), **more)


def storages(kv: PagedKV) -> list[Any]:
    """All bytes of the engine's memory, also those that belong to no plane."""
    found = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in kv.parts}
    return [torch.tensor([], dtype=torch.uint8).set_(storage).clone() for storage in found.values()]


@pytest.mark.parametrize("layout", EXAMPLES)
@SETTINGS
@given(shape=shapes, data=st.data())
def test_bytes_of_a_gather_are_the_references(layout: str, shape: Shape, data: st.DataObject) -> None:
    kv = discovered(layout, shape)
    ids = drawn_ids(data, kv.planes.num_blocks)
    expected, before = chunks_of(kv, ids), storages(kv)
    reference.gather(kv, ids, expected)
    for name, backend in backends().items():
        chunks = chunks_of(kv, ids)
        backend.gather(batch_of(kv, ids, chunks))
        assert all(torch.equal(chunk, wanted) for chunk, wanted in zip(chunks, expected, strict=True)), name
    assert all(torch.equal(ours, old) for ours, old in zip(storages(kv), before, strict=True))


@pytest.mark.parametrize("layout", EXAMPLES)
@SETTINGS
@given(shape=shapes, data=st.data())
def test_bytes_of_a_scatter_are_the_references(layout: str, shape: Shape, data: st.DataObject) -> None:
    truth = discovered(layout, shape)
    ids = drawn_ids(data, truth.planes.num_blocks)
    skips = drawn_skips(data, truth, ids)
    chunks = chunks_of(truth, ids)
    for number, chunk in enumerate(chunks):
        chunk.copy_((torch.arange(len(chunk)) * 7 + number) % 253)
    reference.scatter(truth, ids, chunks, skips)
    expected = storages(truth)
    for name, backend in backends().items():
        kv = discovered(layout, shape)
        backend.scatter(batch_of(kv, ids, chunks, skip_tokens=skips))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(storages(kv), expected, strict=True)), name
