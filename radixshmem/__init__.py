"""One host KV cache for every LLM inference engine of a node, in shared memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixshmem.config import ServerConfig
from radixshmem.errors import (
    ClientClosed,
    CorruptRegion,
    GeometryMismatch,
    IndexBusy,
    InsertError,
    NoSpace,
    RadixError,
    RegionRetired,
    ServerNotReady,
    ServerUnavailable,
)
from radixshmem.geometry import (
    COMPONENT_MASK_FULL,
    COMPONENT_MASK_MAMBA,
    COMPONENT_MASK_SWA,
    ComponentType,
    Geometry,
)
from radixshmem.hashing import hash_blocks
from radixshmem.info import ServerInfo
from radixshmem.pull import PullJob, PullResult
from radixshmem.query import InsertResult, QueryResult
from radixshmem.records import Event, EventKind, EventReason, QueryStatus
from radixshmem.store import Pool, SlotStore

if TYPE_CHECKING:
    from radixshmem.client import RadixClient
    from radixshmem.server import RadixServer

__version__ = "0.1.0"

__all__ = [
    "COMPONENT_MASK_FULL",
    "COMPONENT_MASK_MAMBA",
    "COMPONENT_MASK_SWA",
    "ClientClosed",
    "ComponentType",
    "CorruptRegion",
    "Event",
    "EventKind",
    "EventReason",
    "Geometry",
    "GeometryMismatch",
    "IndexBusy",
    "InsertError",
    "InsertResult",
    "NoSpace",
    "Pool",
    "PullJob",
    "PullResult",
    "QueryResult",
    "QueryStatus",
    "RadixClient",
    "RadixError",
    "RadixServer",
    "RegionRetired",
    "ServerConfig",
    "ServerInfo",
    "ServerNotReady",
    "ServerUnavailable",
    "SlotStore",
    "__version__",
    "hash_blocks",
]


# A transfer worker needs neither, and a client nothing of the server: imported for who asks.
_LATER = {"RadixClient": "radixshmem.client", "RadixServer": "radixshmem.server"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
