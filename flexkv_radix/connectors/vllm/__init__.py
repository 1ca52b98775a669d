"""vLLM: `--kv-transfer-config '{"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}'`.

scheduler, worker, layout, plan   the connector's two sides, without importing vLLM
core, connector, events, stats    vLLM's interface
flexkv_v1                         the same behind vLLM's own FlexKVConnectorV1
"""

from flexkv_radix.connectors.vllm.connector import RadixShmemConnector

__all__ = ["RadixShmemConnector"]
