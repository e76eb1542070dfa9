"""`kvcore store check|ls|stat|verify|clear URL`: an operator and a store, without a server. And `kvcore store pool`.

    check    run the conformance suite against it, with keys of its own that are deleted again
    ls       what is there
    stat     how much, by model
    verify   read every record and judge it; `--remove` deletes the bad ones
    clear    delete what is there, all or one model's or one tenant's
    pool     be the memory behind nixl+ucx://SOCKET until SIGTERM or SIGINT (`kvcore.l2.nixl_pool_server`)

A store that belongs to one process at a time cannot be looked at while a server has it; a shared one can. An exclusive
store is cleaned of unreadable leftovers when it is opened, as at every start, and `fs` when it is listed; `verify` says
how many there were.

Nothing prints a secret: a store is shown as `StoreSpec.shown`. Exit status as in `kvcore.cli`: 0 good, 1 bad or not
there, 2 unusable input. Progress goes to standard error, results to standard output.

Who holds: each command its own backend, until it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from kvcore.config.values import parse_size
from kvcore.errors import CallerError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.checks.bed import Bed, Opening, Traits
from kvcore.l2.checks.suite import CHECKS, Check, Verdict, name_of, run_check
from kvcore.l2.envelope import Defect
from kvcore.l2.inspect import Inspector, Listed, as_it_lies, open_shown
from kvcore.l2.nixl_pool_server import PoolServer
from kvcore.l2.open import StoreSpec, parse_store
from kvcore.l2.wrapped import CountingAdapter
from kvcore.l2.wrapped_backend import is_shared
from kvcore.ports import Notice
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice

_THREADS = 4
_PROGRESS_NS = 500_000_000
_TOKEN_BYTES = 4
_DELETE_KEYS = 100
_FAILED_IN_A_ROW_MAX = 10
"""Reads: a store that does not answer any more would cost a time-out for each record that it has listed."""
_FORGETFUL = frozenset({"memory", "objectstore+memory"})


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("store", help="look after an L2 store", description="Look after an L2 store.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = _action(actions, "check", "run the conformance suite against a store", _check)
    check.add_argument("--only", metavar="TEXT", default="", help="only checks whose name holds this")
    check.add_argument("--deadline", type=float, default=60.0, metavar="S", help="seconds for one check (default 60)")
    for name, about, run in (
        ("ls", "list what is there", _ls),
        ("stat", "how much is there, by model", _stat),
        ("verify", "read every record and judge it", _verify),
        ("clear", "delete what is there", _clear),
    ):
        action = _action(actions, name, about, run)
        action.add_argument("--model", metavar="NAME", help="this model's alone")
        action.add_argument("--salt", metavar="SALT", help="this tenant's alone")
        if name == "verify":
            action.add_argument("--remove", action="store_true", help="delete what is bad")
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="do not ask")
    pool = actions.add_parser(
        "pool",
        help="memory that processes of this machine share, for nixl+ucx://",
        description="Hold memory that the processes of this machine share through nixl+ucx://SOCKET, until SIGTERM.",
    )
    pool.add_argument("socket", metavar="SOCKET", help="path of the unix socket to listen on")
    pool.add_argument("--memory", metavar="SIZE", required=True, help="how much, such as 64GiB")
    pool.set_defaults(run=_pool)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    parser.add_argument("url", metavar="URL", help="the store, as for serve --l2")
    parser.set_defaults(run=run)
    return parser


class _Progress:
    """A line on standard error now and then. `step` says how far it is."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._clock = SystemClock()
        self._shown_ns = self._clock.now_ns()

    def step(self, text: str) -> None:
        now_ns = self._clock.now_ns()
        if now_ns - self._shown_ns >= _PROGRESS_NS:
            self._shown_ns = now_ns
            print(f"kvcore store: {self._doing}, {text}", file=sys.stderr, flush=True)


# -- check


def _check(arguments: argparse.Namespace) -> int:
    spec = as_it_lies(parse_store(arguments.url))
    chosen = [check for check in CHECKS if arguments.only in name_of(check)]
    if not chosen:
        raise CallerError(f"no check has a name with {arguments.only!r} in it")
    return asyncio.run(_run_checks(spec, chosen, arguments.deadline))


async def _run_checks(spec: StoreSpec, chosen: list[Check], deadline_s: float) -> int:
    traits = _traits(spec)
    broken = 0
    with closing(ThreadExecutor(asyncio.get_running_loop(), _THREADS)) as executor:
        for number, check in enumerate(chosen, 1):
            finding = await run_check(check, _bed(spec, traits, executor), deadline_s)
            reason = f": {finding.text}" if finding.text else ""
            print(f"[{number:2}/{len(chosen)}] {finding.verdict.value:<15} {finding.name}{reason}", flush=True)
            if finding.verdict is Verdict.BROKEN:
                broken += 1
                if traits.shared:
                    # One that is lost would break each promise, at the price of a deadline.
                    open_shown(spec, spec.open_backend).close()
    print(f"{spec.shown}: {broken} of {len(chosen)} promises broken")
    return 1 if broken else 0


def _traits(spec: StoreSpec) -> Traits:
    """Opens the store once, to see that it is there. No check may limit it: that would evict others' records."""
    backend = open_shown(spec, spec.open_backend)
    backend.close()
    lasting = spec.scheme not in _FORGETFUL
    return Traits(restart=lasting, shared=lasting and is_shared(backend), capacity=False)


def _bed(spec: StoreSpec, traits: Traits, executor: ThreadExecutor) -> Bed:
    loop = asyncio.get_running_loop()
    clock = SystemClock()

    def notice() -> Notice:
        return EventfdNotice(loop)

    def open_adapter(opening: Opening) -> CountingAdapter:
        assert opening == Opening(), "a limit would evict what others have stored"
        return spec.build(open_shown(spec, spec.open_backend), executor=executor, notice_factory=notice, clock=clock)

    return Bed(open_adapter, executor, traits, clock.token(_TOKEN_BYTES))


# -- ls, stat, verify, clear


@contextmanager
def _inspected(arguments: argparse.Namespace) -> Iterator[Inspector]:
    inspector = Inspector(parse_store(arguments.url))
    try:
        yield inspector
    except OSError as error:
        raise StoreError(f"{inspector.shown} has failed: {error}") from error
    finally:
        inspector.close()


def _chosen(inspector: Inspector, arguments: argparse.Namespace, doing: str) -> Iterator[Listed]:
    """What the options ask for, with progress. Things without a key are nobody's, and come without options alone."""
    progress = _Progress(doing)
    for number, listed in enumerate(inspector.records(), 1):
        progress.step(f"{number} records seen")
        if _is_asked_for(listed.key, arguments):
            yield listed


def _is_asked_for(key: ObjectKey | None, arguments: argparse.Namespace) -> bool:
    if key is None:
        return arguments.model is None and arguments.salt is None
    return arguments.model in (None, key.model_name) and arguments.salt in (None, key.cache_salt)


def _ls(arguments: argparse.Namespace) -> int:
    with _inspected(arguments) as inspector:
        for listed in _chosen(inspector, arguments, "listing"):
            age = f"{listed.age_s:.0f}s" if listed.age_s is not None else "-"
            kind = "" if listed.key is not None else "  (no record)"
            print(f"{listed.record_bytes:>12}  {age:>8}  {listed.name}{kind}")
    return 0


def _stat(arguments: argparse.Namespace) -> int:
    objects: Counter[str] = Counter()
    total: Counter[str] = Counter()
    with _inspected(arguments) as inspector:
        for listed in _chosen(inspector, arguments, "counting"):
            model = repr(listed.key.model_name) if listed.key is not None else "(no record)"
            objects[model] += 1
            total[model] += listed.record_bytes
    for model in sorted(objects):
        print(f"{objects[model]:>10} objects  {total[model]:>16} bytes  {model}")
    print(f"{objects.total():>10} objects  {total.total():>16} bytes  in all")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    bad: Counter[str] = Counter()
    good = failed_in_a_row = 0
    with _inspected(arguments) as inspector:
        for listed in _chosen(inspector, arguments, "reading"):
            verdict = inspector.judge(listed)
            failed_in_a_row = failed_in_a_row + 1 if isinstance(verdict, Exception) else 0
            if failed_in_a_row == _FAILED_IN_A_ROW_MAX:
                raise StoreError(f"{inspector.shown} has failed {failed_in_a_row} times in a row: {verdict}")
            if verdict is None:
                good += 1
                continue
            bad[_word(verdict)] += 1
            print(f"{_word(verdict)}: {listed.name}")
            if arguments.remove and listed.key is not None and isinstance(verdict, Defect):
                bad["could not be removed"] += sum(error is not None for error in inspector.delete([listed.key]))
    bad.update({f"{defect.value} (removed)": count for defect, count in inspector.removed.items()})
    print(f"{good} good", *(f"{count} {word}" for word, count in sorted(bad.items()) if count), sep=", ")
    return 1 if bad.total() else 0


def _word(verdict: Defect | Exception) -> str:
    return verdict.value if isinstance(verdict, Defect) else "could not be read"


def _clear(arguments: argparse.Namespace) -> int:
    with _inspected(arguments) as inspector:
        keys = [one.key for one in _chosen(inspector, arguments, "listing") if one.key is not None]
        if not arguments.yes and not _agreed(f"delete {len(keys)} objects from {parse_store(arguments.url).shown}?"):
            raise CallerError("nothing was deleted; --yes deletes without asking")
        progress = _Progress("deleting")
        failed = 0
        for start in range(0, len(keys), _DELETE_KEYS):
            errors = inspector.delete(keys[start : start + _DELETE_KEYS])
            if all(errors):
                raise StoreError(f"{inspector.shown} has failed, {start - failed} objects are deleted: {errors[0]}")
            failed += sum(error is not None for error in errors)
            progress.step(f"{start} of {len(keys)}")
    print(f"{len(keys) - failed} objects deleted" + (f", {failed} could not be" if failed else ""))
    return 1 if failed else 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- pool


def _pool(arguments: argparse.Namespace) -> int:
    return asyncio.run(_serve_pool(arguments.socket, parse_size(arguments.memory)))


async def _serve_pool(path: str, capacity_bytes: int) -> int:
    server = PoolServer(path, capacity_bytes)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.close)
    print(f"kvcore store pool: ready, nixl+ucx://{path}", file=sys.stderr, flush=True)
    await server.serve()
    return 0
