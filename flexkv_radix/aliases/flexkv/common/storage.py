"""flexkv.common.storage"""

from flexkv_radix.layout import KVCacheLayout, KVCacheLayoutType

__all__ = ["KVCacheLayout", "KVCacheLayoutType"]
