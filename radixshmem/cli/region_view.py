"""What radixctl reads from a server's region, alive or dead, as plain data.

Reading maps the files read-only and takes no lock, so it also works when every process is gone, and
never disturbs one that is not.  ``joined`` attaches as a client, for what must see or change a live tree.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from radixshmem import _native
from radixshmem.control import ControlClient
from radixshmem.errors import CorruptRegion, RadixError
from radixshmem.geometry import POOL_NAMES, ComponentType
from radixshmem.index import Index, Snapshot
from radixshmem.info import ServerInfo
from radixshmem.names import default_endpoint
from radixshmem.records import ClientRecord, ClientState, Node, RegionInfo, SnapshotSummary
from radixshmem.region import open_index
from radixshmem.server.lock import lock_holder
from radixshmem.stats import name_stats

LABEL = "radixctl"
_RPC_TIMEOUT_S = 2.0
_TORN_RETRIES = 5  # an unlocked copy of a tree under change may be torn


class NothingThereError(RadixError):
    """Neither a server nor a region has this name."""


@contextmanager
def opened(name: str) -> Iterator[int]:
    """fd of the index ``name``; NothingThereError without one."""
    try:
        fd = open_index(name)
    except FileNotFoundError:
        raise NothingThereError(_describe_absence(name)) from None
    except PermissionError:
        raise RadixError(f"user id {os.geteuid()} may not open the region {name}: ask for --group") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _describe_absence(name: str) -> str:
    with suppress(PermissionError):
        if lock_holder(name) is not None:
            return f"there is no region {name} yet: status says what its radix-server waits for"
    return f"there is no region {name}"


@contextmanager
def joined(name: str) -> Iterator[Index]:
    """The index ``name``, attached as a client for the body's time."""
    with opened(name) as fd:
        index = Index(fd, LABEL)
        try:
            yield index
        finally:
            index.close()


def read_status(name: str, endpoint: str = "") -> dict[str, Any]:
    """Server, region, pools and totals.  NothingThereError when there is neither server nor region."""
    holder, server = _find_server(name, endpoint or default_endpoint(name))
    status: dict[str, Any] = {
        "name": name,
        "server": {
            "alive": holder is not None,
            "pid": holder,
            "mode": server.mode if server else None,
            "last_error": server.last_error if server else "",
            "progress": server.progress if server else 0.0,
            "version": server.version if server else None,
        },
        "region": None,
    }
    try:
        with opened(name) as fd:
            status |= _read_region(fd)
    except NothingThereError:
        if holder is None:
            raise NothingThereError(f"there is neither a radix-server nor a region {name}") from None
    return status


def read_clients(name: str) -> list[dict[str, Any]]:
    """The entries of the client table, radixctl's own left out."""
    with opened(name) as fd:
        records = _native.peek_clients(fd)
    now_ns = time.time_ns()
    return [
        {
            "slot": record.slot,
            "label": record.label,
            "pid": record.pid,
            "state": _client_state(record),
            "leased": record.is_leased,
            "device": record.device,
            "pins": record.num_pins,
            "staged": dict(zip(POOL_NAMES.values(), record.num_staged, strict=True)),
            "queries": record.queries,
            "hit_blocks": record.hit_blocks,
            "miss_blocks": record.miss_blocks,
            "attached_s": round((now_ns - record.attached_unix_ns) / 1e9, 3),
        }
        for record in records
    ]


def _client_state(record: ClientRecord) -> str:
    """What the entry says, but an ACTIVE one whose process is gone is dead: nobody has reaped it yet."""
    if record.state is ClientState.ACTIVE and not record.is_alive:
        return "dead"
    return record.state.name.lower()


def read_stats(name: str) -> dict[str, Any]:
    """The region's counters by name."""
    with opened(name) as fd:
        return name_stats(_native.peek_stats(fd))


def read_nodes(name: str) -> Iterator[dict[str, Any]]:
    """Published and staged FULL slots in the order of their ids."""
    with opened(name) as fd:
        snapshot = _peek(fd)
    for node in snapshot.nodes():
        yield _node_dict(node)


def read_pins(name: str) -> list[dict[str, Any]]:
    """Blocks that a pin sits on: its deepest block, or one of its window."""
    return [
        node for node in read_nodes(name) if node["pins"] or any(s["pins"] for s in node["sides"].values())
    ]


def _read_region(fd: int) -> dict[str, Any]:
    info = _native.region_peek(fd)
    stats = name_stats(_native.peek_stats(fd))
    summary = _peek(fd).summarize()
    return {
        "region": _region_dict(info),
        "pools": [
            _pool_dict(info, component, summary)
            for component in ComponentType
            if info.config.geometry.pool(component)
        ],
        "clients": stats["num_clients"],
        "pins": summary.num_pins,
        "stats": stats,
        "hit_rate": {name: _hit_rate(stats, name) for name in POOL_NAMES.values()},
    }


def _region_dict(info: RegionInfo) -> dict[str, Any]:
    config = info.config
    return {
        "state": info.state.name.lower(),
        "epoch": config.epoch.hex(),
        "generation": info.generation,
        "layout_version": info.layout_version,
        "index_bytes": info.region_bytes,
        "data_bytes": config.data_bytes,
        "data_name": config.data_name,
        "hugepage_path": config.hugepage_path,
        "evict_policy": config.evict_policy,
        "max_clients": config.max_clients,
        "geometry": config.geometry.as_dict(),
    }


def _pool_dict(info: RegionInfo, component: ComponentType, summary: SnapshotSummary) -> dict[str, Any]:
    pool = info.config.geometry.pool(component)
    assert pool is not None
    return {
        "component": POOL_NAMES[component],
        "total": pool.num_slots,
        "free": summary.free[component],
        "staged": summary.staged[component],
        "pinned": summary.pinned[component],
        "evictable": summary.evictable[component],
        "stride": pool.stride,
    }


def _hit_rate(stats: dict[str, Any], component: str) -> float | None:
    """Part of the blocks asked for that were there; None before the first query."""
    hits, misses = stats["hit_blocks"][component], stats["miss_blocks"][component]
    return hits / (hits + misses) if hits + misses else None


def _peek(fd: int) -> Snapshot:
    for attempt in range(_TORN_RETRIES):
        try:
            return Snapshot.peek(fd)
        except CorruptRegion:
            if attempt == _TORN_RETRIES - 1:
                raise
    raise AssertionError("unreachable")


def _node_dict(node: Node) -> dict[str, Any]:
    return {
        "slot": node.slot,
        "state": "published" if node.is_published else "staged",
        "hash": f"{node.hash:016x}" if node.is_published else None,
        "parent": node.parent,
        "children": node.num_children,
        "pins": node.pins,
        "pinned_path": node.is_path_pinned,
        "last_access": node.last_access,
        "owner": node.owner,
        "sides": {
            POOL_NAMES[component]: {**dataclasses.asdict(side)}
            for component, side in node.sides.items()
            if side.slot >= 0
        },
    }


def _find_server(name: str, endpoint: str) -> tuple[int | None, ServerInfo | None]:
    """(pid or 0 of the living server, its answer).  Who may not read the lock can only ask."""
    try:
        holder = lock_holder(name)
    except PermissionError:
        server = _ask_server(endpoint)
        return (server.pid, server) if server else (None, None)
    return holder, None if holder is None else _ask_server(endpoint)


def _ask_server(endpoint: str) -> ServerInfo | None:
    client = ControlClient(endpoint, _RPC_TIMEOUT_S)
    try:
        return client.status()
    except (RadixError, TimeoutError):
        return None  # it holds the lock but does not answer: starting, stopping, or stopped by a signal
    finally:
        client.close()
