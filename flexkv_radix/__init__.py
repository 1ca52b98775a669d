"""FlexKV's CPU tier on the shared store: from token ids to bytes moved.

Names are loaded when they are asked for: a transfer worker needs no configuration, a rank no task
engine, and a scheduler no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from flexkv_radix.manager import KVManager
    from flexkv_radix.responses import KVResponse, KVResponseStatus
    from flexkv_radix.server.server import KVServer
    from flexkv_radix.settings import FlexKVSettings, load_settings
    from flexkv_radix.tasks import KVTaskEngine
    from flexkv_radix.tier import CacheEngineRadixShmem, ShmRadixMatch, StagedRadixInsert
    from flexkv_radix.tp_client import KVTPClient

_MODULES = {
    "attach": (
        "adopt_radix_server",
        "attach_radix_client",
        "check_geometry",
        "expected_geometry",
        "radix_server_is_distributed",
    ),
    "config": ("CacheConfig", "ModelConfig", "RankInfo", "SWAPoolConfig"),
    "events": ("AllBlocksCleared", "BlockRemoved", "BlockStored"),
    "fingerprint": ("model_identity",),
    "hashing": ("hash_tokens",),
    "layout": ("KVCacheLayout", "KVCacheLayoutType", "LayerGroupSpec", "OpaqueBlockLayout"),
    "manager": ("KVManager",),
    "responses": ("KVResponse", "KVResponseStatus"),
    "server.server": ("KVServer",),
    "settings": ("FlexKVSettings", "load_settings"),
    "tasks": ("KVTaskEngine",),
    "tier": ("CacheEngineRadixShmem", "ShmRadixMatch", "StagedRadixInsert"),
    "tp_client": ("KVTPClient",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

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
    "KVServer",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
