"""flexkv.server.client"""

from flexkv_radix.tp_client import KVTPClient

__all__ = ["KVTPClient"]
