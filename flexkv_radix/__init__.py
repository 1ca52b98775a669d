"""FlexKV's CPU tier on the shared store: from token ids to bytes moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexkv_radix.attach import (
    adopt_radix_server,
    attach_radix_client,
    check_geometry,
    expected_geometry,
    radix_server_is_distributed,
)
from flexkv_radix.config import CacheConfig, ModelConfig, RankInfo, SWAPoolConfig
from flexkv_radix.events import AllBlocksCleared, BlockRemoved, BlockStored
from flexkv_radix.fingerprint import model_identity
from flexkv_radix.hashing import hash_tokens
from flexkv_radix.layout import KVCacheLayout, KVCacheLayoutType, LayerGroupSpec, OpaqueBlockLayout
from flexkv_radix.responses import KVResponse, KVResponseStatus
from flexkv_radix.settings import FlexKVSettings, load_settings
from flexkv_radix.tier import CacheEngineRadixShmem, ShmRadixMatch, StagedRadixInsert

if TYPE_CHECKING:
    from flexkv_radix.manager import KVManager
    from flexkv_radix.tasks import KVTaskEngine
    from flexkv_radix.tp_client import KVTPClient

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheConfig",
    "CacheEngineRadixShmem",
    "FlexKVSettings",
    "KVCacheLayout",
    "KVCacheLayoutType",
    "KVManager",
    "KVResponse",
    "KVResponseStatus",
    "KVTPClient",
    "KVTaskEngine",
    "LayerGroupSpec",
    "ModelConfig",
    "OpaqueBlockLayout",
    "RankInfo",
    "SWAPoolConfig",
    "ShmRadixMatch",
    "StagedRadixInsert",
    "adopt_radix_server",
    "attach_radix_client",
    "check_geometry",
    "expected_geometry",
    "hash_tokens",
    "load_settings",
    "model_identity",
    "radix_server_is_distributed",
]

# A rank needs no task engine and a scheduler no torch: loaded for who asks.
_LAZY = {
    "KVManager": "flexkv_radix.manager",
    "KVTaskEngine": "flexkv_radix.tasks",
    "KVTPClient": "flexkv_radix.tp_client",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
