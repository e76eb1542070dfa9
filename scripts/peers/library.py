"""The libraries side by side: the same calls on the same inputs, each side in a process of its own, in turns.

    hashing        a prompt of 128K tokens, from a list
    prefix rule    64 rows x 4,096 chunks, half of them full attention, half with a window of 16 chunks
    L1             reserve, publish, lease, release and delete, of batches that the other side gets as well
    files          2 MiB objects into files and back; the pages are in the page cache
    memory         what a process grows by per object, besides the object's bytes; a fresh process each round

Both sides have to come to the same result of the prefix rule, or nothing is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from kvcore.bench.figures import median
from peers.environment import Talker, talker
from peers.figures import CYCLE_BATCHES, SIDES, Samples, in_turns

HERE = Path(__file__).resolve().parent
NOT_COMPARABLE = (
    "L1: LMCache's L1Manager runs without listeners, so its eviction policy, which a server attaches, is not in the "
    "figure; kvcore's LRU order is. kvcore's leases carry an owner and a deadline each, LMCache's are a count with one "
    "deadline. LMCache makes a tensor object per cached object.",
    "Files: kvcore's records carry an envelope with the full key and a checksum of every byte, written and verified "
    "within the figure; LMCache's carry none. Loads come from the page cache on both sides.",
    "Memory: the growth of the process, so what the allocators round up is part of it, and the key is, too.",
)

HASHES, FOLDS, CYCLE_KEYS, FILE_BATCHES = 5, 50, 5120, 3
WARM = 1


def measure(python: Path, directory: Path, rounds: int) -> tuple[Samples, dict[str, dict[str, str]]]:
    """Samples of all figures, and the versions of both sides."""
    with ExitStack() as stack:
        sides = _sides(stack, python, directory)
        _check_same(sides)
        found = in_turns(sides, rounds, warm=WARM, one=lambda side, _: _round(side))
        versions = {label: side.versions for label, side in sides.items()}
    for turn in range(rounds):
        with ExitStack() as stack:
            sides = _sides(stack, python, directory / f"memory-{turn}")
            for label, side in sides.items():
                found.setdefault("object_bytes", {}).setdefault(label, []).append(side.ask("memory")["bytes"])
    return found, versions


def _sides(stack: ExitStack, python: Path, directory: Path) -> dict[str, Talker]:
    directory.mkdir(exist_ok=True)
    programs = {"kvcore": sys.executable, "lmcache": str(python)}
    return {
        label: stack.enter_context(
            talker([programs[label], str(HERE / f"library_{label}.py"), str(directory)], directory / f"{label}.log")
        )
        for label in SIDES
    }


def _check_same(sides: Mapping[str, Talker]) -> None:
    for name in ("full", "holes"):
        results = [(answer["kept"], answer["length"]) for side in sides.values() for answer in [_fold(side, name)]]
        assert results[0] == results[1], f"the prefix rules disagree on {name!r}: {results}"


def _fold(side: Talker, name: str, times: int = 1) -> dict[str, float]:
    answer: dict[str, float] = side.ask("fold", name=name, times=times)
    return answer


def _round(side: Talker) -> dict[str, float]:
    taken = {"hash_list": side.ask("hashes", times=HASHES)}
    taken |= {f"fold_{name}": _fold(side, name, FOLDS) for name in ("full", "holes")}
    for batch in CYCLE_BATCHES:
        answer = side.ask("cycle", batch=batch, times=CYCLE_KEYS // batch)
        taken[f"cycle_{batch}"] = {name: value / batch for name, value in answer.items()}
    for kind in ("file", "slab"):
        taken |= _batches(side, kind)
    walls = {name: answer["us"] for name, answer in taken.items()}
    return walls | {f"{name}_cpu": answer["cpu_us"] for name, answer in taken.items()}


def _batches(side: Talker, kind: str) -> dict[str, dict[str, float]]:
    """The medians of a few batches stored and loaded: one alone is at the mercy of what else the machine does."""
    ways = ("store", "load")
    taken = [{way: side.ask(kind, way=way) for way in ways} for _ in range(FILE_BATCHES)]
    return {
        f"{kind}_{way}": {name: median([each[way][name] for each in taken]) for name in ("us", "cpu_us")}
        for way in ways
    }
