"""What is compared: names, units, bars; and how samples of two sides become one figure.

A *figure* is a median over rounds, with the least and the greatest, for each side, and how many times as good kvcore is
by the medians. `bar`: how many times as good it has to be; None where nothing was promised. `cpu_advantage`: the same
by processor time, which says what the work costs where others use the machine as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.bench.figures import median

SIDES = ("kvcore", "lmcache")
PLAIN = "plain copy of the same bytes"  # a yardstick, of the machine and not of a cache
CYCLE_BATCHES = (1, 16, 64, 512)
Samples = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Figure:
    """`cpu`: the figure that says the same in processor time."""

    group: str
    what: str
    unit: str
    more_is_better: bool
    bar: float | None = None
    cpu: str = ""


def _library() -> Iterator[tuple[str, Figure]]:
    """Times of one call, with the processor time of each beside it."""
    timed = {
        "hash_list": ("hashing", "hash 131,072 tokens, from a list, in chunks of 256", 1.3),
        "fold_full": ("prefix rule", "fold and unfold 64 rows x 4,096 chunks, all there", 10.0),
        "fold_holes": ("prefix rule", "the same with a hole in each row", 10.0),
        **{
            f"cycle_{batch}": ("L1", f"reserve, publish, lease, release, delete: per key, {batch} at a time", 3.0)
            for batch in CYCLE_BATCHES
        },
        "file_store": ("files", "store 16 x 2 MiB, a file each", 1.5),
        "file_load": ("files", "load them", 1.5),
        "slab_store": ("files", "store them: kvcore's slab against files", None),
        "slab_load": ("files", "load them: kvcore's slab against files", None),
    }
    for name, (group, what, bar) in timed.items():
        yield name, Figure(group, what, "us", False, bar, f"{name}_cpu")
        yield f"{name}_cpu", Figure(group, f"{what} (processor time)", "us", False)
    yield "object_bytes", Figure("L1", "memory per cached object besides its bytes", "B", False)


FIGURES: dict[str, Figure] = {
    **dict(_library()),
    "lookups_per_s": Figure("server", "whole lookups", "1/s", True),
    "lookup_server_us": Figure("server", "server's processor time per lookup", "us", False),
    "lookup_client_us": Figure("server", "client's processor time per lookup", "us", False),
    "long_ms": Figure("server", "long lookup, one at a time", "ms", False, None, "long_server_ms"),
    "long_server_ms": Figure("server", "server's processor time per long lookup", "ms", False),
    "store_gb_per_s": Figure("server", "store through shared memory", "GB/s", True, None, "store_cpu_gb_per_s"),
    "store_cpu_gb_per_s": Figure("server", "store, per second of the client's processor time", "GB/s", True),
    "retrieve_gb_per_s": Figure(
        "server", "retrieve through shared memory", "GB/s", True, None, "retrieve_cpu_gb_per_s"
    ),
    "retrieve_cpu_gb_per_s": Figure("server", "retrieve, per second of the client's processor time", "GB/s", True),
    "plain_gb_per_s": Figure("server", PLAIN, "GB/s", True, None, "plain_cpu_gb_per_s"),
    "plain_cpu_gb_per_s": Figure("server", f"{PLAIN}, per second of processor time", "GB/s", True),
    "store_share": Figure("server", "store against the plain copy", "", True),
    "retrieve_share": Figure("server", "retrieve against the plain copy", "", True),
}


def in_turns(
    sides: Mapping[str, Any], rounds: int, *, warm: int, one: Callable[[Any, int], Mapping[str, float]]
) -> Samples:
    """Per figure and side the samples of `rounds` rounds, after `warm` ones that do not count.

    One side right after the other, and each first in every second round.
    """
    found: Samples = {}
    for turn in range(warm + rounds):
        order = list(sides.items())
        for label, side in order if turn % 2 else reversed(order):
            for name, value in one(side, turn).items():
                if turn >= warm:
                    found.setdefault(name, {}).setdefault(label, []).append(value)
    return found


def compared(samples: Samples) -> dict[str, dict[str, Any]]:
    """The figures, in the order of FIGURES."""
    found = {name: _compared(figure, samples[name]) for name, figure in FIGURES.items() if name in samples}
    for name, tree in found.items():
        cpu = found.get(FIGURES[name].cpu)
        tree["cpu_advantage"] = None if cpu is None else cpu["advantage"]
    return found


def _compared(figure: Figure, samples: Mapping[str, list[float]]) -> dict[str, Any]:
    middle = {label: median(samples[label]) for label in SIDES}
    ratio = middle["kvcore"] / middle["lmcache"]
    spread = {
        label: {"median": middle[label], "min": min(values), "max": max(values), "n": len(values)}
        for label, values in samples.items()
    }
    return {
        "group": figure.group,
        "what": figure.what,
        "unit": figure.unit,
        "bar": figure.bar,
        "advantage": ratio if figure.more_is_better else 1 / ratio,
        **spread,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    for label, versions in found["versions"].items():
        yield f"{label}: " + ", ".join(f"{name} {text}" for name, text in versions.items())
    machine = found["machine"]
    loads = f"load {machine['load_before']:.1f} before, {machine['load_after']:.1f} after"
    yield f"{machine['cpus']} processors, {loads}"
    yield f"{'median (least - greatest)':<66}{'kvcore':>26}{'LMCache':>26}{'times as good':>15}{'by CPU':>8}{'bar':>6}"
    for figure in found["figures"].values():
        sides = "".join(f"{_spread(figure[label]):>26}" for label in SIDES)
        unit = f" [{figure['unit']}]" if figure["unit"] else ""
        cpu = "" if figure["cpu_advantage"] is None else f"{figure['cpu_advantage']:.2f}"
        yield f"{figure['what'] + unit:<66}{sides}{figure['advantage']:>15.2f}{cpu:>8}{_bar(figure):>6}"
    yield "What this does not show:"
    yield from (f"  - {text}" for text in found["not_comparable"])


def _bar(figure: Mapping[str, Any]) -> str:
    bar = figure["bar"]
    return "" if bar is None else f"{bar:g}" if figure["advantage"] >= bar else f"<{bar:g}!"


def _spread(side: Mapping[str, float]) -> str:
    return f"{_short(side['median'])} ({_short(side['min'])} - {_short(side['max'])})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
