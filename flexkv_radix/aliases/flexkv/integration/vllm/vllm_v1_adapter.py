"""flexkv.integration.vllm.vllm_v1_adapter"""

from flexkv_radix.connectors.vllm.flexkv_v1 import FlexKVConnectorV1Impl

__all__ = ["FlexKVConnectorV1Impl"]
