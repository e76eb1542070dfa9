"""What happens when an engine registers its pages: discover, compare, try, and only then take them.

    tensors --discover--> `TensorPages` --fingerprints--> the namespace must name these
            --byte round trip through the engine's own copy engine--> WorkerConnector.register

The keys of a cache are named before there is a tensor (the scheduler has none), so what the chunks will be is worked
out from the engine's configuration, by `fingerprints` of whatever tells it, and goes into the namespace
(`layout_name`). At registration the tensors themselves are discovered: other fingerprints end it. So does a byte that
does not survive the way to the pages and back (`page_check.py`). Serving must not begin then.

Engines call `register`. Who has plain numpy pages by construction, as the simulated engine, calls the connector's own:
there is no layout to be discovered, and its oracles compare every byte that is loaded.

Who holds: the engine its pages; at registration nobody computes. Nothing is freed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.connectors.page_check import check_tensors
from kvcore.connectors.pages import TensorPages
from kvcore.connectors.worker import WorkerConnector
from kvcore.device.discover import normalize_kv_and_discover_format
from kvcore.device.fingerprint import layout_fingerprint
from kvcore.device.formats import KVLayout, LayoutHints
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import digest_fields
from kvcore.ports import CopyEngine


def discover(groups: Sequence[tuple[Any, LayoutHints]]) -> TensorPages:
    """Per group its tensors, nested as the engine has them, and what its configuration knows. Raises ConfigError."""
    return TensorPages([normalize_kv_and_discover_format(tensors, hints) for tensors, hints in groups])


def fingerprint(layout: KVLayout) -> str:
    """What the bytes of a cell are, from pages of this layout."""
    return layout_fingerprint(layout, order="blocks")


def fingerprints(pages: TensorPages) -> tuple[str, ...]:
    """Per group what the bytes of a cell are."""
    return tuple(fingerprint(kv.layout) for kv in pages.groups)


def layout_name(layout: CacheLayout, kv_fingerprints: Sequence[str]) -> str:
    """The `layout` of the namespace: the cache's groups and, per group, what the engine's pages hold."""
    assert len(kv_fingerprints) == len(layout.groups)
    fields = {"cache": layout.fingerprint} | {f"kv{index}": text for index, text in enumerate(kv_fingerprints)}
    return digest_fields("engine layout", fields).hex()[:32]


async def register(
    worker: WorkerConnector, pages: TensorPages, device: CopyEngine, promised: Sequence[str] | None = None
) -> None:
    """Give the pages to the worker's connector. `promised`: the fingerprints that the namespace was made from.

    Raises ConfigError for pages of another layout, InternalError for bytes that do not survive the round trip.
    """
    if promised is not None:
        check_promised(pages, promised)
    await check_tensors(pages.groups, device)
    worker.register(pages, device)


def check_promised(pages: TensorPages, promised: Sequence[str]) -> None:
    """Raises ConfigError for pages of another layout than the namespace was made from."""
    found = fingerprints(pages)
    if found != tuple(promised):
        group = next(index for index, text in enumerate(found) if [text] != list(promised[index : index + 1]))
        raise ConfigError(
            f"group {group}: the pages are {pages.groups[group].layout}, the keys were named for other bytes; "
            "scheduler and workers must be configured alike"
        )
