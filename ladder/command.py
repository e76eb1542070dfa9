"""`kvcore ladder`: climb the rungs from the command line.

Progress and the table go to standard error when `--json` is given, so that standard output holds JSON only.
Exit status: 0 only when every rung passed; 1 when one failed; 2 for unusable input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvcore.cli import parse_bytes
from kvcore.errors import ConfigError
from kvcore.ladder.options import (
    CHUNK_TOKENS,
    REQUESTS,
    STORM_CASES,
    LadderOptions,
    check_admission,
    check_cases,
    check_cells,
    check_mapping,
    check_model,
    check_rungs,
    check_seed,
    check_store,
    check_storms,
    check_target,
    check_transfer,
)
from kvcore.ladder.swarm.command import check_artifacts


def register(commands: Any) -> None:
    """Add `ladder` to the command line (entry point `kvcore.commands`)."""
    parser = commands.add_parser("ladder", help="does the cache change any output? Climb the rungs")
    parser.add_argument("--target", default="sim", help="sim (default), local, torch or vllm")
    parser.add_argument("--rungs", default="0-4", metavar="0-4", help="which rungs to climb; 5-8 are the storm rungs")
    parser.add_argument("--seed", default="0", metavar="N", help="draws requests and schedule (default 0)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests from a Mooncake-format trace (JSON lines)")
    parser.add_argument("--cell", action="append", default=[], metavar="CELL", help="one configuration; repeatable")
    parser.add_argument("--connector", metavar="MOD:CLASS", help="climb with your own connector")
    parser.add_argument("--connector-config", metavar="JSON", help="its kv_connector_extra_config (target vllm)")
    parser.add_argument("--engine-config", metavar="JSON", help="arguments for vLLM's LLM (target vllm)")
    parser.add_argument(
        "--model", metavar="NAME", help="llama, gemma3, gpt-oss, fingerprint or fingerprint-window (target vllm)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="requests per pass (default 120; local 48)")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="cache chunk size in tokens (16; vllm 64)")
    parser.add_argument("--l1", type=parse_bytes, metavar="SIZE", help="capacity of each server's L1")
    parser.add_argument("--l2", type=Path, metavar="DIR", help="directory of the file L2 (target local)")
    parser.add_argument(
        "--store", metavar="URL", help="target torch: a running store (redis://..., s3://...) behind the servers' L1"
    )
    parser.add_argument("--transfer", default="worker", metavar="WHO", help="who copies KV: worker (default) or server")
    parser.add_argument(
        "--admission", default="always", metavar="WHAT", help="what is loaded: always (default), or if-it-pays"
    )
    parser.add_argument("--cases", metavar="N", help=f"cases of each storm rung (default {STORM_CASES})")
    parser.add_argument("--artifacts", type=Path, metavar="DIR", help="write a directory per failed case into DIR")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="worker processes")
    parser.add_argument("--json", action="store_true", help="write the result as JSON to standard output")
    parser.set_defaults(run=run)


def options_from(arguments: argparse.Namespace) -> LadderOptions:
    """Check everything that can be checked before the climb."""
    target = check_target(arguments.target)
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs takes a number of processes from 1 on, not {arguments.jobs}")
    passes, storms = check_rungs(arguments.rungs)
    options = LadderOptions(
        target=target,
        passes=passes,
        seed=check_seed(arguments.seed),
        trace=arguments.trace,
        requests=REQUESTS[target] if arguments.requests is None else arguments.requests,
        chunk_tokens=CHUNK_TOKENS[target] if arguments.chunk_tokens is None else arguments.chunk_tokens,
        l1_bytes=arguments.l1,
        l2_dir=arguments.l2,
        connector=arguments.connector,
        cells=check_cells(arguments.cell),
        storms=storms,
        cases=check_cases(arguments.cases),
        artifacts=check_artifacts(arguments.artifacts),
        transfer=check_transfer(arguments.transfer),
        admission=arguments.admission,
        store=check_store(arguments.store, target),
        model=check_model(arguments.model, target),
        connector_config=check_mapping(arguments.connector_config, target, "--connector-config"),
        engine_config=check_mapping(arguments.engine_config, target, "--engine-config"),
    )
    check_storms(options)
    check_admission(options)
    _check_used(arguments, options)
    return options


def _check_used(arguments: argparse.Namespace, options: LadderOptions) -> None:
    """What nobody would look at is refused: it was meant to do something."""
    no_passes = ("cell", "trace", "l1", "l2", "requests") if not options.passes else ()
    if options.transfer != "worker" and not (options.passes and options.connector is None):
        raise ConfigError("--transfer is for kvcore's own workers and servers, on the rungs 0 to 4")
    no_storms = ("cases", "artifacts") if not options.storms else ()
    for name in (*no_passes, *no_storms):
        if getattr(arguments, name) not in (None, []):
            rungs = "0 to 4" if name in no_passes else "5 to 8"
            raise ConfigError(f"--{name} is for the rungs {rungs}, and none of them is climbed")


def run(arguments: argparse.Namespace) -> int:
    """Climb, print, and answer with the exit status."""
    from kvcore.ladder.climb import climb_all  # heavy; --help does without
    from kvcore.ladder.table import render

    options = options_from(arguments)
    result = climb_all(options, jobs=arguments.jobs, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(result.to_json(), indent=1))
        print(render(result), file=sys.stderr)
    else:
        print(render(result))
    return 0 if result.verdict == "pass" else 1
