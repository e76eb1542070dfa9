"""`make report`: one report of each kind, from generated data and a short ladder, swarm and zoo, with the time of each.

    python scripts/report_samples.py                 into build/reports
    python scripts/report_samples.py --samples       into reports/samples, which is committed

Every command is one that a user can type; the page of a report names it. `calibrate` needs torch and measures this
machine; without torch it is left out, in one line.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUGS = (
    "draining_memory_is_never_freed",
    "locked_records_are_evicted",
    "all_granted_cells_are_published",
    "second_writer_is_never_freed",
    "hash_without_what_came_before",
    "proven_death_is_not_heard",
    "read_without_a_hold",
)
RESULTS = {
    "ladder": ["ladder", "--rungs", "0-4", "--cell", "full/r1/inproc/sync", "--requests", "40", "--json"],
    "swarm": ["sim", "swarm", "--seeds", "60", "--json"],
    "zoo": ["zoo", "--seeds", "12", "--catches", "3", "--shrink-runs", "0", "--json"],
}
SERVED = ["--limit", "1000", "--workers", "4", "--tier", "host memory (DMA)=100GiB", "--tier", "S3=1TiB,shared"]
OBJECTIVE = ["--slo", "ttft:2000", "tpot:50"]


def reports(results: str) -> dict[str, list[str]]:
    """The options of each report."""
    made = [part for name in RESULTS for part in (f"--{name}", f"{results}/{name}.json")]
    return {
        "breakeven": ["--model", "Llama-3.1-8B", "--model", "gpt-oss-120b", "--host", "H100", "--host", "A100"],
        "trace": [*SERVED, "--policy", "never", "always", "pays", "split", *OBJECTIVE],
        "goodput": [*SERVED, "--load", "0.6", "1", "1.4", "1.6", "2", "--jobs", "2", *OBJECTIVE],
        "ladder": made,
        "calibrate": ["--rounds", "7"],
        "compare": [f"{results}/breakeven-A100", f"{results}/breakeven-H100"],
    }


def kvcore(words: list[str], output: Path | None = None) -> bool:
    """Run one command; a report or a zoo that found something bad has worked as well."""
    command = [sys.executable, "-m", "kvcore.cli", *words]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{time.monotonic() - started:6.1f} s  kvcore {' '.join(words)}", flush=True)
    if done.returncode not in (0, 1):
        print(done.stderr, end="")
    elif output is not None:
        output.write_text(done.stdout)
    return done.returncode in (0, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", action="store_true", help="into reports/samples")
    folder = "reports/samples" if parser.parse_args().samples else "build/reports"
    started = time.monotonic()
    results = "build/results"
    (ROOT / results).mkdir(parents=True, exist_ok=True)
    only = [part for name in BUGS for part in ("--only", name)]
    good = [
        kvcore([*words, *(only if name == "zoo" else [])], ROOT / results / f"{name}.json")
        for name, words in RESULTS.items()
    ]
    for host in ("A100", "H100"):
        good.append(kvcore(["report", "breakeven", "--host", host, "--out", f"{results}/breakeven-{host}", "--force"]))
    for kind, options in reports(results).items():
        if kind == "calibrate" and importlib.util.find_spec("torch") is None:
            print("NOT MADE: calibrate, because torch is not installed")
        else:
            good.append(kvcore(["report", kind, *options, "--out", f"{folder}/{kind}", "--force"]))
    print(f"{time.monotonic() - started:6.1f} s  all, in {folder}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
