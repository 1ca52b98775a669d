"""flexkv.common.request"""

from flexkv_radix.responses import KVResponse, KVResponseStatus

__all__ = ["KVResponse", "KVResponseStatus"]
