"""flexkv.common.config"""

from flexkv_radix.config import CacheConfig, ModelConfig, RankInfo

__all__ = ["CacheConfig", "ModelConfig", "RankInfo"]
