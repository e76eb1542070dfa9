"""The far end: serves a peer from an interpreter that kvcore need not be installed in. Standard library only.

    PYTHON -P child.py lmcache|PACKAGE.MODULE:FACTORY

One JSON command a line comes in on stdin, one JSON reply a line goes out on stdout; whatever else the peer prints goes
to stderr. What the peer raises is replied by the name of its class. There is one cache at a time; it ends with `close`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

LMCACHE = "lmcache"


def load(spec: str) -> Any:
    """The peer that `spec` names; the current directory is searched, too.

    ImportError, AttributeError, TypeError or ValueError say what is wrong with it.
    """
    if spec == LMCACHE:
        return _from_file(Path(__file__).with_name("lmcache_peer.py")).Lmcache()
    module, colon, factory = spec.partition(":")
    if not colon or not module or not factory:
        raise ValueError(f"{spec!r} is neither {LMCACHE!r} nor 'package.module:factory'")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module), factory)()


def _from_file(path: Path) -> Any:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class _Served:
    """The commands, by name."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer
        self._cache: Any = None

    def about(self) -> dict[str, Any]:
        peer = self._peer
        means = {call: {word: list(meant) for word, meant in each.items()} for call, each in peer.means.items()}
        has = {"prefix": peer.prefix is not None, "real": hasattr(peer, "real_cache")}
        return {"name": peer.name, "means": means, **has}

    def open(self, room: int, real: bool) -> None:
        self._cache = self._peer.real_cache(room) if real else self._peer.cache(room)

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._cache, name)(*arguments)

    def prefix(self, name: str, *arguments: Any) -> Any:
        return getattr(self._peer.prefix, name)(*arguments)


def main() -> int:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    served = _Served(load(sys.argv[1]))
    replies.write("{}\n")
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        try:
            reply = {"said": getattr(served, do)(*arguments)}
        except Exception as error:
            reply = {"raised": type(error).__name__}
        replies.write(json.dumps(reply) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
