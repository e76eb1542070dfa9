"""At rest: which books of the cache are still open, and what is wrong with those that should be closed.

A book may stay open for good reasons for a while after the faults have stopped: a session whose END was lost runs out,
a store that hung comes back, a debt is paid at the third attempt. So one waits until nothing is open, with a deadline,
and then lets the oracles look. What is dead is not asked.

Nothing is held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvcore.ladder.server_stack import ServerStack
from kvcore.ladder.stack import CacheStack
from kvcore.ladder.stack_counters import check_counters
from kvcore.service.connection import ConnectionStatistics
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.ports.network import SimNetwork

_SERVER_BOOKS = ("sessions", "lookups_open", "stores_open", "reads_open")
_L1_BOOKS = ("leases", "holds", "bytes_staging", "bytes_draining")
_CLIENT_BOOKS = ("stores_open", "reads_open", "copies_open")


def lives(name: str, dead: Collection[str]) -> bool:
    """Whether nothing dead touches the server called `name`: neither itself nor its adapters nor its network."""
    return not any(name in target.replace(">", ".").split(".") for target in dead)


def open_books(stack: CacheStack, dead: Collection[str]) -> Iterator[str]:
    """One line per living part that is not at rest."""
    for rank in range(stack.config.layout.ranks):
        if not stack.worker(rank).idle:
            yield f"worker{rank} {stack.worker(rank).statistics()}"
    for server in stack.servers:
        if lives(server.name, dead):
            yield from _of_server(server)
    yield from _of_clients(stack, dead)


def _of_server(server: ServerStack) -> Iterator[str]:
    if not server.idle:
        yield f"{server.name} is busy: {server.storage.statistics()}"
    yield from _open(server.name, server.server.statistics(), _SERVER_BOOKS)
    yield from _open(f"{server.name}'s L1", server.storage.statistics().l1, _L1_BOOKS)
    for adapter in server.adapters:
        yield from _open(adapter.name, adapter.usage(), ("locked",))


def _of_clients(stack: CacheStack, dead: Collection[str]) -> Iterator[str]:
    """Connections and clients. A dead server is owed things for ever, so with one dead they are not asked."""
    if dead:
        return
    for name, state in stack.states():
        if isinstance(state, ConnectionStatistics):
            yield from _open(name, state, ("outstanding", "waiting"))
            if state.debts > state.debts_asleep:  # those that sleep are paid when the server is heard from again
                yield f"{name}: debts are {state.debts}, {state.debts_asleep} of them asleep"
        elif not name.startswith("server"):
            yield from _open(name, state, _CLIENT_BOOKS)


def _open(name: str, state: object, books: Collection[str]) -> Iterator[str]:
    for book in books:
        value = getattr(state, book, 0)
        if value:
            yield f"{name}: {book} is {value}"


def underway(network: SimNetwork, dead: Collection[str]) -> Iterator[str]:
    """Messages that will still arrive. To what is dead they are sent for ever."""
    if network.messages_underway and not dead:
        yield f"{network.messages_underway} messages are under way"


def check_at_rest(stack: CacheStack, dead: Collection[str], findings: Findings) -> None:
    """Every living server's own oracles look at its books; the workers' are looked at here."""
    for server in stack.servers:
        if lives(server.name, dead):
            server.check_at_rest()
    if dead:
        return
    check_counters(stack, findings)
    for name, state in stack.states():
        if name.startswith("worker"):
            for line in _open(name, state, _CLIENT_BOOKS):
                findings.report("leases", f"at rest, {line}")
