"""Cells as a worker names them to its client. Values only; nobody holds or frees anything because of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

CellT = TypeVar("CellT", "StoreCell", "LoadCell")


@dataclass(frozen=True, slots=True)
class StoreCell:
    group: int
    chunk_hash: bytes


@dataclass(frozen=True, slots=True)
class LoadCell:
    group: int
    chunk_index: int
    chunk_hash: bytes


@dataclass(frozen=True, slots=True)
class PageCell(Generic[CellT]):
    """A cell and the engine's blocks of it, in order; block 0 of a load is left alone."""

    cell: CellT
    blocks: Sequence[int]
