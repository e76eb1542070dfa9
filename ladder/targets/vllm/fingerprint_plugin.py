"""vLLM's entry point `vllm.general_plugins` for the fingerprint model.

vLLM calls `register` in each of its processes, wherever kvcore is installed. It does nothing unless the ladder has
asked by `ASKED`, in the environment that processes inherit: users get no other model and import nothing.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import os

from kvcore.ladder.targets.vllm.fingerprint import ARCHITECTURE

ASKED = "KVCORE_LADDER_FINGERPRINT"


def register() -> None:
    """Called by vLLM. A second call changes nothing."""
    if os.environ.get(ASKED) != "1":
        return
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(
            ARCHITECTURE, "kvcore.ladder.targets.vllm.fingerprint_layer:FingerprintForCausalLM"
        )
