"""flexkv.transfer_manager"""

from flexkv_radix.connectors.sglang.flexkv_config import TransferManagerOnRemote

__all__ = ["TransferManagerOnRemote"]
