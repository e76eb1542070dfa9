"""Mutants of identity: which bytes belong under which name, and whose they are (group J)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug

_HASHER = "kvcore.keys:ChunkHasher"

MUTANTS = (
    bug(
        "hash_without_what_came_before",
        "J",
        "a chunk's name holds its own tokens only, so equal chunks behind other prefixes share it (R44, R45)",
        "bytes",
        Edit(
            f"{_HASHER}._extend",
            "    previous = hashes[-1] if hashes else self._digest\n",
            "    previous = self._digest\n",
        ),
    ),
    bug(
        "tenant_of_the_last_lookup",
        "J",
        "the memory tier looks under the salt of the session's lookup before (R47)",
        "prefix hits liveness leases",
        Edit("kvcore.service.server:CacheServer._lookup", "salt=request.salt,", "salt=session.salt,"),
    ),
)
