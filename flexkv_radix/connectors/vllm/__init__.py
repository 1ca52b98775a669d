"""vLLM: `--kv-transfer-config '{"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}'`.

scheduler, worker, layout, plan   the connector's two sides, without importing vLLM
core, connector, stats            vLLM's interface
flexkv_v1                         the same behind vLLM's own FlexKVConnectorV1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexkv_radix.connectors.vllm.connector import RadixShmemConnector

__all__ = ["RadixShmemConnector"]


def __getattr__(name: str) -> Any:
    """vLLM is imported when it asks for the connector, so that the rest works without it."""
    if name == "RadixShmemConnector":
        from flexkv_radix.connectors.vllm.connector import RadixShmemConnector

        return RadixShmemConnector
    raise AttributeError(name)
