"""`make bench-peers`: kvcore and LMCache 0.5.6 side by side, in turns, in one run: libraries and cache servers.

Theory of operation
-------------------
Each side runs in processes and interpreters of its own (`peers/environment.py`), gets the same inputs, and takes its
times beside the code that it measures. What is printed of every figure is the median, the least and the greatest of the
rounds, and how many times as good kvcore is by the medians, by the clock and by processor time; where something was
promised, the bar. The parts are in `peers/`: `library.py` (hashing, prefix rule, L1, files, memory) and `servers.py`
(lookups, store, retrieve). A figure that misses its bar is marked in the table; it is a finding, not a failure.

The figures go to `build/results/peers.json`, and where reports can be drawn, a page of them to `build/reports/peers`.

Where LMCache cannot be installed it says so in one loud line and ends with 0; with CI=true it fails. TORCH_PIP is what
pip is told to install for torch, as in the Makefile. `--python` takes an environment that has both already.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import library, servers
from peers.environment import ROOT, CannotInstall, peer_python
from peers.figures import compared, lines

SCHEMA = 2
RESULT = ROOT / "build" / "results" / "peers.json"
PAGE = ROOT / "build" / "reports" / "peers"
PARTS = ("library", "servers")


def measure(python: Path, sizes: servers.Sizes, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Everything, as one JSON-able dict."""
    begin = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvp-") as name:
        samples, versions = library.measure(python, Path(name), sizes.rounds)
        if "servers" in parts:
            samples |= servers.measure(python, Path(name), sizes)
    return {
        "schema": SCHEMA,
        "sizes": asdict(sizes),
        "versions": versions,
        "machine": {"cpus": os.cpu_count(), "load_before": begin, "load_after": os.getloadavg()[0]},
        "figures": compared(samples),
        "not_comparable": [*library.NOT_COMPARABLE, *servers.NOT_COMPARABLE],
    }


def draw(found: Path) -> None:
    """The page, where the extra for reports is installed."""
    command = [sys.executable, "-m", "kvcore.cli", "report", "peers", str(found), "--out", str(PAGE), "--force"]
    subprocess.run(command, check=False, cwd=ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(description="kvcore and LMCache, side by side.")
    parser.add_argument("--python", type=Path, help="an interpreter that has torch and LMCache already")
    parser.add_argument("--quick", action="store_true", help="fewer lookups in a round")
    parser.add_argument("--library", action="store_true", help="without the servers")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help=f"default {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    sizes = servers.Sizes(lookups=256, long_lookups=3) if arguments.quick else servers.Sizes()
    try:
        python = arguments.python or peer_python()
        found = measure(python, sizes, PARTS[:1] if arguments.library else PARTS)
    except CannotInstall as error:
        print(f"##### LMCACHE IS NOT THERE, the comparison is SKIPPED: {error} #####", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))
    draw(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
