"""`kvcore bench server`: measure a cache server on this machine, beside yardsticks of the same run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvcore.bench.server import Sizes, bench_server


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("bench", help="measure this machine", description="Measure what is installed here.")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    server = what.add_parser("server", help="a cache server: round trips, lookups, copies through shared memory")
    server.add_argument("--quick", action="store_true", help="fewer repetitions: a first impression in seconds")
    server.add_argument("--json", action="store_true", help="JSON only")
    server.set_defaults(run=_server)


def _server(arguments: argparse.Namespace) -> int:
    quick = Sizes(rounds=3, round_trips=1000, big_lookups=10, throughput_lookups=300)
    found = bench_server(quick if arguments.quick else Sizes())
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    trips, big, rate = (found[name] for name in ("round_trip", "big_lookup", "throughput"))
    return [
        f"{trips['what']} (n = {trips['n']})",
        f"    p50 {trips['ack_p50_us']:.0f} us, p99 {trips['ack_p99_us']:.0f} us; "
        f"echo p50 {trips['echo_p50_us']:.0f} us, p99 {trips['echo_p99_us']:.0f} us; ratio {trips['ratio_p50']:.2f}",
        f"    processor time per message: {trips['ack_cpu_us']:.0f} us, echo {trips['echo_cpu_us']:.0f} us; "
        f"ratio {trips['ratio_cpu']:.2f}",
        f"{big['what']} (n = {big['n']})",
        f"    p50 {big['p50_ms']:.2f} ms, worst {big['max_ms']:.2f} ms",
        f"{rate['what']} (n = {rate['n']})",
        f"    {rate['lookups_per_s']:.0f} lookups per second",
        *_copy_lines(found["copies"]),
        *_copy_lines(found["copies_by_server"]),
    ]


def _copy_lines(copies: dict[str, Any]) -> list[str]:
    return [
        f"{copies['what']} (n = {copies['n']})",
        f"    store {copies['store_gb_per_s']:.2f} GB/s ({copies['store_share']:.0%} of a plain copy), "
        f"retrieve {copies['retrieve_gb_per_s']:.2f} GB/s ({copies['retrieve_share']:.0%}), "
        f"plain {copies['memcpy_gb_per_s']:.2f} GB/s",
        f"    by processor time of both processes: store {copies['store_share_cpu']:.0%}, "
        f"retrieve {copies['retrieve_share_cpu']:.0%} of a plain copy",
    ]
