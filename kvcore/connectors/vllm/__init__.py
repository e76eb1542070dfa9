"""kvcore as vLLM's KV connector. Needs vLLM; nothing else in kvcore imports this package."""

from typing import Any

__all__ = ["KvcoreConnector", "SharedHost"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: vLLM loads `plugin` in processes that need no connector."""
    if name == "KvcoreConnector":
        from kvcore.connectors.vllm.connector import KvcoreConnector

        return KvcoreConnector
    if name == "SharedHost":
        from kvcore.connectors.vllm.sides import SharedHost

        return SharedHost
    raise AttributeError(name)
