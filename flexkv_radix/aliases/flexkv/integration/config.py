"""flexkv.integration.config"""

from flexkv_radix.connectors.sglang.flexkv_config import FlexKVConfig

__all__ = ["FlexKVConfig"]
