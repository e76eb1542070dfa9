"""The rung table as a picture: `python -m kvcore.reports.rung_picture LADDER.json PICTURE.png`.

LADDER.json is what `kvcore ladder --json` wrote. The rungs are drawn from the ground up, each with what it compared and
its verdict; nothing is computed here. Needs matplotlib (`pip install 'kvcore[reports]'`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.kinds.results import LadderFile, read
from kvcore.reports.page.png import check_drawing

COLUMNS = (
    ("requests", "requests"),
    ("tokens\ncompared", "tokens_compared"),
    ("tokens\ndiffer", "mismatches"),
    ("loads\nchecked", "loads_verified"),
    ("stores\nchecked", "stores_verified"),
    ("preempted", "preemptions"),
    ("... store\nin flight", "preemptions_store_inflight"),
    ("hit\nshare", "hit_share"),
)
GREEN, RED, RAIL = "#2E7D4F", "#B3261E", "#8C6D46"
_LEFT, _STEP, _VERDICT = 3.4, 1.35, 14.4
_DPI = 100


def draw(rungs: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path:
    """`rungs` as in the JSON, lowest first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.36 * len(rungs)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.4, 15.6)
    axes.set_ylim(-0.6, len(rungs) + 0.5)
    axes.set_title(title, loc="left", fontsize=10)
    for number, (head, _) in enumerate(COLUMNS):
        axes.text(_LEFT + _STEP * (number + 1), len(rungs) - 0.35, head, ha="right", va="bottom", fontsize=7)
    for rail in (-0.25, 15.4):
        axes.plot([rail, rail], [-0.55, len(rungs) - 0.4], color=RAIL, linewidth=5, solid_capstyle="round")
    for height, rung in enumerate(rungs):
        _rung(axes, height, rung)
    figure.savefig(path, dpi=_DPI, metadata={"Software": "kvcore"})
    return path


def _rung(axes: Any, height: int, rung: Mapping[str, Any]) -> None:
    axes.plot([-0.25, 15.4], [height - 0.42, height - 0.42], color=RAIL, linewidth=2, alpha=0.6)
    axes.text(0, height, f"{rung['rung']}", fontsize=9, weight="bold", va="center")
    axes.text(1.1, height, rung["name"], fontsize=9, va="center")
    for number, (_, name) in enumerate(COLUMNS):
        bad = name == "mismatches" and rung.get(name)
        text = shown(rung.get(name))
        place = _LEFT + _STEP * (number + 1)
        axes.text(place, height, text, ha="right", va="center", fontsize=8.5, color=RED if bad else "black")
    passed = rung["verdict"] == "pass"
    box = {"boxstyle": "round,pad=0.25", "facecolor": GREEN if passed else RED, "edgecolor": "none"}
    where = {"ha": "left", "va": "center", "fontsize": 8}
    axes.text(_VERDICT, height, rung["verdict"], color="white", bbox=box, **where)


def shown(value: float | None) -> str:
    """A dash for what there is none of."""
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def main(words: Sequence[str]) -> int:
    """The command of the module text."""
    if len(words) != 2:
        raise SystemExit("usage: python -m kvcore.reports.rung_picture LADDER.json PICTURE.png")
    check_drawing()
    file = read(Path(words[0]), LadderFile, "LADDER.json")
    rungs = json.loads(Path(words[0]).read_text(encoding="utf-8"))["rungs"]  # with the fields that no page shows
    title = f"kvcore ladder: {len(file.cells)} configurations, target {file.target}, seed {file.seed}: {file.verdict}"
    print(draw(rungs, title, Path(words[1])))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"rung_picture: {error}")
