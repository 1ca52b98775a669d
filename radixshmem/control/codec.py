"""Between the messages on the wire and the types of the package."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixshmem.control import control_pb2 as pb
from radixshmem.geometry import Geometry
from radixshmem.info import SERVER_MODES, ServerInfo

_GEOMETRY_FIELDS = [field.name for field in dataclasses.fields(Geometry)]
_INFO_FIELDS = [f.name for f in dataclasses.fields(ServerInfo) if f.name not in ("mode", "geometry")]


def geometry_to_wire(geometry: Geometry) -> pb.Geometry:
    return pb.Geometry(**{name: getattr(geometry, name) for name in _GEOMETRY_FIELDS})


def geometry_from_wire(message: pb.Geometry) -> Geometry:
    """Raises ValueError when the message describes no geometry."""
    return Geometry(**{name: getattr(message, name) for name in _GEOMETRY_FIELDS})


def info_to_wire(info: ServerInfo) -> pb.ServerInfo:
    geometry = _published_to_wire(info.geometry) if info.geometry else None
    return pb.ServerInfo(
        mode=info.mode, geometry=geometry, **{name: getattr(info, name) for name in _INFO_FIELDS}
    )


def info_from_wire(message: pb.ServerInfo) -> ServerInfo:
    """Raises ValueError for a mode that this version does not know."""
    if message.mode not in SERVER_MODES:
        raise ValueError(f"the server is in an unknown mode {message.mode!r}")
    return ServerInfo(
        mode=message.mode,
        geometry=_published_from_wire(message.geometry) if message.HasField("geometry") else None,
        **{name: getattr(message, name) for name in _INFO_FIELDS},
    )


def _published_to_wire(geometry: dict[str, Any]) -> pb.PublishedGeometry:
    pools = {name: pb.PublishedGeometry.Pool(**pool) for name, pool in geometry["pools"].items()}
    return pb.PublishedGeometry(**{**geometry, "pools": pools})


def _published_from_wire(message: pb.PublishedGeometry) -> dict[str, Any]:
    return {
        "block_size": message.block_size,
        "slot_align": message.slot_align,
        "register_chunk_tokens": message.register_chunk_tokens,
        "fingerprint": message.fingerprint,
        "pools": {
            name: _pool_from_wire(message.pools[name])
            for name in ("full", "swa", "mamba")
            if name in message.pools
        },
    }


def _pool_from_wire(pool: pb.PublishedGeometry.Pool) -> dict[str, int]:
    shape = {"num_slots": pool.num_slots, "slot_bytes": pool.slot_bytes}
    if pool.HasField("window_blocks"):
        shape["window_blocks"] = pool.window_blocks
    return shape
