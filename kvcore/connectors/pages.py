"""An engine's pages as a worker copies them: what is put into one cell, or taken out of it.

Theory of operation
-------------------
A cell in the cache is dense: block after block, and in a block layer after layer, each in the engine's own order. Both
kinds of pages below give and take exactly these bytes, and so do servers that copy by themselves (`page_map.py`); the
layout fingerprint of this order is "blocks" (`kvcore.device.fingerprint`).

    `ArrayPages`    numpy views on host memory: one plain `Copy` per block, which names the block for those who watch
    `TensorPages`   discovered torch tensors, on the host or on a device: one `PagedCopy` per cell, for copy engines
                    that know the kernels (`CpuCopyEngine`, `CudaCopyEngine`)

One `PagedCopy` per cell has each block as a chunk of its own: that is what keeps the order of blocks, whatever the
planes are. Measured on vLLM's page layout (32 layers of 64 KiB, 16 blocks): 12 GB/s instead of 8.7 with numpy; cells of
8 to 512 KiB are some 20 to 30 us slower each.

Null blocks are never named by a store, and left alone by a load.

Who holds: the engine its memory, as long as the worker lives. Nothing is announced or freed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvcore.connectors.views import NULL_BLOCK
from kvcore.device.discover import PagedKV
from kvcore.device.paged import Direction, PagedCopy
from kvcore.errors import ConfigError
from kvcore.ports import Copy


class Pages(Protocol):
    """One engine's pages on one rank, by group. Copies are for `kvcore.ports.CopyEngine.submit`."""

    def __len__(self) -> int:
        """Groups."""
        ...

    def block_bytes(self, group: int) -> int:
        """Of one block in all layers."""
        ...

    def out_of(self, group: int, blocks: Sequence[int], view: memoryview) -> list[Any]:
        """Copies of the blocks, in order, into a cell's bytes."""
        ...

    def into(self, group: int, blocks: Sequence[int], view: memoryview) -> list[Any]:
        """Copies of a cell's bytes into the blocks, in order; those of null blocks go nowhere."""
        ...


class ArrayPages:
    """`pages[g]`: [blocks, layers, block_tokens, width]. One that is not dense is moved in the order of its axes."""

    def __init__(self, pages: Sequence[Any]) -> None:
        self._pages = pages
        self._parts: dict[tuple[int, int], Any] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def block_bytes(self, group: int) -> int:
        return int(self._pages[group][0].nbytes)

    def out_of(self, group: int, blocks: Sequence[int], view: memoryview) -> list[Any]:
        size = self.block_bytes(group)
        assert NULL_BLOCK not in blocks
        return [
            Copy(self._part(group, block), view[index * size : (index + 1) * size], "store", block)
            for index, block in enumerate(blocks)
        ]

    def into(self, group: int, blocks: Sequence[int], view: memoryview) -> list[Any]:
        size = self.block_bytes(group)
        return [
            Copy(view[index * size : (index + 1) * size], self._part(group, block), "load", block)
            for index, block in enumerate(blocks)
            if block != NULL_BLOCK
        ]

    def _part(self, group: int, block: int) -> Any:
        part = self._parts.get((group, block))
        if part is None:
            page = self._pages[group][block]
            view = memoryview(page)
            part = self._parts[group, block] = view.cast("B") if view.c_contiguous else page
        return part


class TensorPages:
    """`groups[g]`: the discovered tensors of group g (`kvcore.connectors.registration.discover`)."""

    def __init__(self, groups: Sequence[PagedKV]) -> None:
        self.groups = tuple(groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def device_type(self) -> str:
        """Where all of them lie. Raises ConfigError for groups on different devices."""
        devices = sorted({str(kv.device) for kv in self.groups})
        if len(devices) > 1:
            raise ConfigError(f"the groups' pages lie on several devices: {', '.join(devices)}")
        return devices[0].partition(":")[0] if devices else "cpu"

    def block_bytes(self, group: int) -> int:
        return self.groups[group].planes.block_bytes

    def out_of(self, group: int, blocks: Sequence[int], view: memoryview) -> list[Any]:
        assert NULL_BLOCK not in blocks
        return self._copy(Direction.GATHER, group, list(enumerate(blocks)), view)

    def into(self, group: int, blocks: Sequence[int], view: memoryview) -> list[Any]:
        real = [(index, block) for index, block in enumerate(blocks) if block != NULL_BLOCK]
        return self._copy(Direction.SCATTER, group, real, view)

    def _copy(self, direction: Direction, group: int, blocks: Sequence[tuple[int, int]], view: memoryview) -> list[Any]:
        if not blocks:
            return []
        size = self.block_bytes(group)
        chunks = [view[index * size : (index + 1) * size] for index, _ in blocks]
        return [PagedCopy(direction, self.groups[group], [[block] for _, block in blocks], chunks)]
