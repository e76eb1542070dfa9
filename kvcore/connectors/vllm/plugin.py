"""vLLM's entry point `vllm.general_plugins`: makes the connector known by its name, so that no module path is needed.

vLLM loads such plugins in each of its processes, possibly several times, and imports the connector itself only where it
is asked for.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

CONNECTOR = "KvcoreConnector"


def register() -> None:
    """Called by vLLM. A second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvcore.connectors.vllm.connector", CONNECTOR)
