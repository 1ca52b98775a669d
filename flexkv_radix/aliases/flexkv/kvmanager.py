"""flexkv.kvmanager"""

from flexkv_radix.manager import KVManager

__all__ = ["KVManager"]
