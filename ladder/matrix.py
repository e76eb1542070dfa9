"""The configurations a climb covers: groups x ranks x servers x load mode.

`servers` 0 means in-process: no server process, one cache in the engine's own. A cell is named by its text form, which
the command line accepts back (`--cell full+window/r2/s1/async`).
"""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = ("full", "full+window", "full+window+recurrent")


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One configuration."""

    groups: str
    ranks: int
    servers: int
    load_async: bool

    def __str__(self) -> str:
        where = f"s{self.servers}" if self.servers else "inproc"
        return f"{self.groups}/r{self.ranks}/{where}/{'async' if self.load_async else 'sync'}"

    @classmethod
    def parse(cls, text: str) -> MatrixCell:
        """The inverse of `str`. Raises ValueError naming the nearest cell."""
        for cell in FULL_MATRIX:
            if str(cell) == text:
                return cell
        raise ValueError(f"no matrix cell is called {text!r}; cells look like {FULL_MATRIX[-1]} or {FULL_MATRIX[0]}")


FULL_MATRIX = tuple(
    MatrixCell(groups, ranks, servers, load_async)
    for groups in GROUPS
    for ranks in (1, 2)
    for servers in (0, 1, 2)
    for load_async in (False, True)
)
"""36 cells; two servers shard by rank when there are two ranks, else by chunk."""
