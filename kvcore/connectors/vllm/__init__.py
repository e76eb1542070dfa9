"""kvcore as vLLM's KV connector. Needs vLLM; nothing else in kvcore imports this package."""

from kvcore.connectors.vllm.connector import KvcoreConnector, SharedHost

__all__ = ["KvcoreConnector", "SharedHost"]
