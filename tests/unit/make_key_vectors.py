"""Prints kvcore/data/key_vectors.json. Not a test; `test_keys.py` runs it in fresh interpreters.

    python tests/unit/make_key_vectors.py > kvcore/data/key_vectors.json

The file is the contract with every other process and release: if it has to change, raise HASH_VERSION as well.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvcore.keys import HASH_VERSION, ChunkHasher, Namespace, ObjectKey, encode_key, key_text

_PLAIN: dict[str, Any] = {"model_name": "meta-llama/Llama-3.1-8B", "chunk_tokens": 4}

_NAMESPACES: dict[str, dict[str, Any]] = {
    "plain": _PLAIN,
    "every field": {
        "model_name": "org/modèle",
        "model_revision": "main",
        "kv_dtype": "bfloat16",
        "layout": "0011223344556677",
        "quantisation": "fp8",
        "adapter": "lora-1",
        "chunk_tokens": 4,
    },
    "adapter S": {**_PLAIN, "adapter": "S"},
    "revision S": {**_PLAIN, "model_revision": "S"},
    "default chunk": {"model_name": "m"},
}
_ENGINE = {**_PLAIN, "hash_mode": "engine", "engine_algorithm": "sha256", "engine_seed": "0"}

_TOKEN_CASES: list[dict[str, Any]] = [
    {"namespace": "plain", "tokens": [], "extras": []},
    {"namespace": "plain", "tokens": [1, 2, 3], "extras": []},
    {"namespace": "plain", "tokens": [0, 1, 2, 2**32 - 1, 5, 6, 7, 8, 9], "extras": []},
    {"namespace": "every field", "tokens": list(range(12)), "extras": []},
    {"namespace": "adapter S", "tokens": [1, 2, 3, 4], "extras": []},
    {"namespace": "revision S", "tokens": [1, 2, 3, 4], "extras": []},
    {"namespace": "plain", "tokens": [7] * 12, "extras": [[5, 6, "00ff"]]},
    {"namespace": "plain", "tokens": [7] * 12, "extras": [[6, 6, "00ff"]]},
    {"namespace": "plain", "tokens": [7] * 12, "extras": [[9, 2, "beef"], [0, 9, "aa"]]},
    {"namespace": "default chunk", "tokens": list(range(600)), "extras": []},
]

_KEYS = [
    ObjectKey(bytes(range(32)), "meta-llama/Llama-3.1-8B", 0),
    ObjectKey(bytes(range(32)), "meta-llama/Llama-3.1-8B", 7, 3, "tenant a"),
    ObjectKey(b"\xff" * 32, "../../etc/passwd\n\x00", 2**32 - 1, 2**32 - 1, "é" * 128),
    ObjectKey(b"h", "lone surrogate \udcff", 1, 0, "\ud800"),
    ObjectKey(b"", "", 0),
]


def token_vector(case: dict[str, Any]) -> dict[str, Any]:
    hasher = ChunkHasher(Namespace(**_NAMESPACES[case["namespace"]]))
    extras = [(offset, length, bytes.fromhex(content_id)) for offset, length, content_id in case["extras"]]
    return {**case, "hashes": [digest.hex() for digest in hasher.hash_tokens(case["tokens"], extras=extras)]}


def engine_vector(block_tokens: int, blocks: list[str]) -> dict[str, Any]:
    hashes = ChunkHasher(Namespace(**_ENGINE)).hash_blocks([bytes.fromhex(block) for block in blocks], block_tokens)
    return {"block_tokens": block_tokens, "blocks": blocks, "hashes": [digest.hex() for digest in hashes]}


def key_vector(key: ObjectKey) -> dict[str, Any]:
    return {"key": [key.chunk_hash.hex(), *key[1:]], "encoded": encode_key(key).hex(), "text": key_text(key)}


def vectors() -> dict[str, Any]:
    blocks = [f"{number:02x}" * 32 for number in range(1, 8)]
    return {
        "hash_version": HASH_VERSION,
        "namespaces": [
            {"name": name, "fields": fields, "digest": Namespace(**fields).digest.hex()}
            for name, fields in [*_NAMESPACES.items(), ("engine", _ENGINE)]
        ],
        "tokens": [token_vector(case) for case in _TOKEN_CASES],
        "engine": [engine_vector(2, blocks), engine_vector(4, blocks), engine_vector(1, ["0011223344556677"] * 8)],
        "keys": [key_vector(key) for key in _KEYS],
    }


if __name__ == "__main__":
    json.dump(vectors(), sys.stdout, indent=1)
    print()
