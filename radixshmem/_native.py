"""The only importer of the C extension: its errors, records and region functions; no policy.

``radixshmem.index`` binds the rest, the verbs of an attached index.  Every function raises for a
negative RS_E* code; what the core calls a result stays a result.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from radixshmem._radixshm import ffi as _ffi
from radixshmem._radixshm import lib as _lib
from radixshmem.arrays import I64Array, U64Array
from radixshmem.errors import (
    CorruptRegion,
    IndexBusy,
    LayoutMismatch,
    RadixError,
    RegionRetired,
    ServerNotReady,
)
from radixshmem.geometry import ComponentType, PoolGeometry, PublishedGeometry
from radixshmem.records import (
    EVICT_POLICIES,
    ClientRecord,
    ClientState,
    Event,
    EventKind,
    EventReason,
    Node,
    RegionConfig,
    RegionInfo,
    RegionState,
    SideRecord,
    StoreInfo,
)

ffi: Any = _ffi
lib: Any = _lib

NO_PARENT = -(2**63)  # INT64_MIN in rs_node.parent
SLOT_PUBLISHED = 2  # rs_node.state
U64, I32, I64 = (ffi.typeof(name) for name in ("uint64_t[]", "int32_t[]", "int64_t[]"))
_from_buffer, _new = ffi.from_buffer, ffi.new


# -- errors ---------------------------------------------------------------------------------------


def raise_for(code: int, what: str) -> None:
    """Raise the exception for a negative ``code`` of the core; ``what`` says which step failed."""
    text = f"{what}: {_text(code)}"
    if code == lib.RS_ESYS:
        raise OSError(ffi.errno, f"{text}: {os.strerror(ffi.errno)}")
    if code == lib.RS_ENOMEM:
        raise MemoryError(text)
    if code == lib.RS_ECLIENTS:
        text += "; start radix-server with a higher --max-clients"
    raise _EXCEPTIONS.get(code, ValueError)(text)


_EXCEPTIONS: dict[int, type[Exception]] = {
    lib.RS_EBUSY: IndexBusy,
    lib.RS_EROOTS: IndexBusy,
    lib.RS_ECORRUPT: CorruptRegion,
    lib.RS_EVERSION: LayoutMismatch,
    lib.RS_ENOTREADY: ServerNotReady,
    lib.RS_ERETIRED: RegionRetired,
    lib.RS_ECLIENTS: RadixError,
    lib.RS_EFORKED: RadixError,
}


def _text(code: int) -> str:
    text: bytes = ffi.string(lib.rs_error_text(code))
    return text.decode()


def check(code: int, what: str) -> None:
    if code < 0:
        raise_for(code, what)


# -- regions --------------------------------------------------------------------------------------


def region_bytes(config: RegionConfig) -> int:
    """Bytes of the index file for ``config``; ValueError when it cannot be planned."""
    out = _new("uint64_t *")
    check(lib.rs_region_bytes(config_to_c(config), out), "index plan")
    return int(out[0])


def region_format(fd: int, config: RegionConfig) -> None:
    """Build the index in the zero-filled file ``fd``; leaves it BUILDING."""
    check(lib.rs_region_format(fd, config_to_c(config)), "index format")


def region_set_state(fd: int, state: RegionState) -> None:
    check(lib.rs_region_set_state(fd, state), "index state")


def region_peek(fd: int) -> RegionInfo:
    """Validate the index header in ``fd`` and copy it; CorruptRegion when it is none of this version."""
    out = _new("rs_info *")
    code = lib.rs_region_peek(fd, out)
    if code == lib.RS_EVERSION:
        raise LayoutMismatch(
            f"index: {_text(code)}: its layout version is {out.layout_version}, this build's is "
            f"{lib.RS_LAYOUT_VERSION}"
        )
    check(code, "index")
    return info_from_c(out)


def store_format(fd: int, total_bytes: int, data_offset: int, epoch: bytes) -> None:
    check(lib.rs_store_format(fd, total_bytes, data_offset, epoch), "SlotStore format")


def store_set_state(fd: int, state: RegionState) -> None:
    check(lib.rs_store_set_state(fd, state), "SlotStore state")


def store_peek(fd: int) -> StoreInfo:
    """Validate the SlotStore header in ``fd`` and copy it."""
    out = _new("rs_store_info *")
    check(lib.rs_store_peek(fd, out), "SlotStore")
    return StoreInfo(
        out.total_bytes,
        out.data_offset,
        bytes(ffi.buffer(out.epoch)),
        RegionState(out.state),
        out.layout_version,
    )


def peek_stats(fd: int) -> dict[str, Any]:
    """``Index.stats`` of a region that nobody may be attached to, through a read-only mapping."""
    out = _new("rs_stats *")
    check(lib.rs_peek_stats(fd, out), "index")
    return struct_to_dict(out[0])


def peek_clients(fd: int) -> list[ClientRecord]:
    """Entries of the client table that are not FREE, through a read-only mapping."""
    out, num = _new("rs_client_info[]", lib.RS_MAX_CLIENTS), _new("uint32_t *")
    check(lib.rs_peek_clients(fd, out, lib.RS_MAX_CLIENTS, num), "index")
    return [client_from_c(out[i]) for i in range(num[0])]


def config_to_c(config: RegionConfig) -> Any:
    out = _new("rs_config *")
    geometry = config.geometry
    for pool in geometry.pools:
        target = out.pool[pool.component]
        target.num_slots, target.window_blocks = pool.num_slots, pool.window_blocks
        target.slot_bytes, target.stride, target.offset = pool.slot_bytes, pool.stride, pool.offset
    out.block_size, out.slot_align = geometry.block_size, geometry.slot_align
    out.register_chunk_tokens = geometry.register_chunk_tokens
    out.evict_policy = EVICT_POLICIES.index(config.evict_policy)
    out.max_clients, out.pins_per_client = config.max_clients, config.pins_per_client
    out.event_capacity = config.event_capacity
    out.reap_quarantine_ns = round(config.reap_quarantine_s * 1e9)
    out.data_bytes, out.swa_ratio, out.mamba_ratio = config.data_bytes, config.swa_ratio, config.mamba_ratio
    out.epoch = config.epoch
    out.fingerprint = geometry.fingerprint.encode()
    out.data_name, out.hugepage_path = config.data_name.encode(), config.hugepage_path.encode()
    return out


def info_from_c(info: Any) -> RegionInfo:
    c = info.config
    pools = tuple(
        PoolGeometry(component, pool.num_slots, pool.slot_bytes, pool.stride, pool.window_blocks, pool.offset)
        for component, pool in zip(ComponentType, c.pool, strict=True)
        if pool.num_slots
    )
    geometry = PublishedGeometry(
        c.block_size, c.slot_align, c.register_chunk_tokens, c_string(c.fingerprint), pools
    )
    config = RegionConfig(
        geometry,
        bytes(ffi.buffer(c.epoch)),
        c.data_bytes,
        c.swa_ratio,
        c.mamba_ratio,
        c_string(c.data_name),
        c_string(c.hugepage_path),
        EVICT_POLICIES[c.evict_policy],
        c.max_clients,
        c.pins_per_client,
        c.event_capacity,
        c.reap_quarantine_ns / 1e9,
    )
    return RegionInfo(
        config, info.region_bytes, info.generation, info.layout_version, RegionState(info.state)
    )


def c_string(array: Any) -> str:
    return str(ffi.string(array).decode(errors="replace"))


def client_from_c(c: Any) -> ClientRecord:
    return ClientRecord(
        c.slot,
        ClientState(c.state),
        bool(c.device),
        c.pid,
        c.incarnation,
        c.pid_namespace,
        c.attached_unix_ns,
        c.deadline_ns,
        c.num_pins,
        tuple(c.num_staged),
        bool(c.alive),
        bool(c.leased),
        c.queries,
        c.hit_blocks,
        c.miss_blocks,
        c_string(c.label),
    )


def struct_to_dict(struct: Any) -> dict[str, Any]:
    return {name: _plain(getattr(struct, name)) for name, _ in ffi.typeof(struct).fields}


def _plain(value: Any) -> Any:
    """cffi value -> int, list (arrays) or dict (structs)."""
    if not isinstance(value, ffi.CData):
        return value
    if ffi.typeof(value).kind == "array":
        return [_plain(item) for item in value]
    return struct_to_dict(value)


EVENT_DTYPE = np.dtype(
    {
        "names": ["hash", "kind", "component"],
        "formats": [np.uint64, np.uint16, np.uint16],
        "offsets": [ffi.offsetof("rs_event", name) for name in ("hash", "kind", "component")],
        "itemsize": ffi.sizeof("rs_event"),
    }
)


def event_from_c(event: Any) -> Event:
    return Event(
        EventKind(event.kind),
        EventReason(event.reason),
        event.hash,
        event.parent_hash if event.has_parent else None,
        ComponentType(event.component),
        event.number,
        event.client,
        event.incarnation,
    )


def node_from_c(n: Any) -> Node:
    sides = {
        component: SideRecord(
            n.side[component], n.side_pins[component], n.cover[component], bool(n.is_end[component])
        )
        for component in (ComponentType.SWA, ComponentType.MAMBA)
    }
    return Node(
        n.slot,
        n.state == SLOT_PUBLISHED,
        n.owner,
        n.gen,
        None if n.parent == NO_PARENT else n.parent,
        n.hash,
        n.num_children,
        n.pins,
        n.last_access,
        bool(n.pinned_path),
        sides,
    )


# -- hashing --------------------------------------------------------------------------------------


def hash_blocks(tokens: I64Array, block_size: int, prefix: I64Array | None) -> U64Array:
    """Chained hashes of the whole blocks of ``tokens``, uint64 [len(tokens) // block_size]."""
    out: U64Array = np.empty(len(tokens) // block_size, np.uint64)
    prefix_c = ffi.NULL if prefix is None else _from_buffer(I64, prefix)
    num_prefix = 0 if prefix is None else len(prefix)
    code = lib.rs_hash_blocks(
        _from_buffer(I64, tokens), len(tokens), block_size, prefix_c, num_prefix, _from_buffer(U64, out)
    )
    check(code, "hash_blocks")
    return out
