"""One host KV cache for every LLM inference engine of a node, in shared memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixshmem.client import RadixClient as RadixClient
    from radixshmem.config import ServerConfig as ServerConfig
    from radixshmem.errors import ClientClosed as ClientClosed
    from radixshmem.errors import CorruptRegion as CorruptRegion
    from radixshmem.errors import GeometryMismatch as GeometryMismatch
    from radixshmem.errors import IndexBusy as IndexBusy
    from radixshmem.errors import InsertError as InsertError
    from radixshmem.errors import NoSpace as NoSpace
    from radixshmem.errors import RadixError as RadixError
    from radixshmem.errors import RegionRetired as RegionRetired
    from radixshmem.errors import ServerNotReady as ServerNotReady
    from radixshmem.errors import ServerUnavailable as ServerUnavailable
    from radixshmem.geometry import COMPONENT_MASK_FULL as COMPONENT_MASK_FULL
    from radixshmem.geometry import COMPONENT_MASK_MAMBA as COMPONENT_MASK_MAMBA
    from radixshmem.geometry import COMPONENT_MASK_SWA as COMPONENT_MASK_SWA
    from radixshmem.geometry import ComponentType as ComponentType
    from radixshmem.geometry import Geometry as Geometry
    from radixshmem.hashing import hash_blocks as hash_blocks
    from radixshmem.info import ServerInfo as ServerInfo
    from radixshmem.pull import PullJob as PullJob
    from radixshmem.pull import PullResult as PullResult
    from radixshmem.query import InsertResult as InsertResult
    from radixshmem.query import QueryResult as QueryResult
    from radixshmem.records import Event as Event
    from radixshmem.records import EventKind as EventKind
    from radixshmem.records import EventReason as EventReason
    from radixshmem.records import QueryStatus as QueryStatus
    from radixshmem.server import RadixServer as RadixServer
    from radixshmem.store import Pool as Pool
    from radixshmem.store import SlotStore as SlotStore

__version__ = "0.1.0"

# The module of each name, imported once the name is asked for: a command begins with almost nothing
# (cli/stop_signals.py), a transfer worker needs no gRPC, and a client nothing of the server.
_HOMES = {
    "COMPONENT_MASK_FULL": "geometry",
    "COMPONENT_MASK_MAMBA": "geometry",
    "COMPONENT_MASK_SWA": "geometry",
    "ClientClosed": "errors",
    "ComponentType": "geometry",
    "CorruptRegion": "errors",
    "Event": "records",
    "EventKind": "records",
    "EventReason": "records",
    "Geometry": "geometry",
    "GeometryMismatch": "errors",
    "IndexBusy": "errors",
    "InsertError": "errors",
    "InsertResult": "query",
    "NoSpace": "errors",
    "Pool": "store",
    "PullJob": "pull",
    "PullResult": "pull",
    "QueryResult": "query",
    "QueryStatus": "records",
    "RadixClient": "client",
    "RadixError": "errors",
    "RadixServer": "server",
    "RegionRetired": "errors",
    "ServerConfig": "config",
    "ServerInfo": "info",
    "ServerNotReady": "errors",
    "ServerUnavailable": "errors",
    "SlotStore": "store",
    "hash_blocks": "hashing",
}

__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
