"""From a client's geometry to regions in shared memory."""

from __future__ import annotations

import grp
import logging
import os
from dataclasses import replace

from radixshmem.config import ServerConfig
from radixshmem.errors import NoSpace
from radixshmem.geometry import Geometry, PublishedGeometry, plan_geometry
from radixshmem.index import Index
from radixshmem.prefault import Prefault, Progress
from radixshmem.records import RegionConfig
from radixshmem.region import Access, create_regions, open_index, open_object, plan_files, retire_regions
from radixshmem.server.leftovers import SERVER_LABEL
from radixshmem.server.machine import Machine
from radixshmem.server.preflight import Need, check_space, numa_nodes

log = logging.getLogger(__name__)

_MAX_GID = 2**32 - 2  # the one above means none to chown


def plan_regions(config: ServerConfig, geometry: Geometry, machine: Machine) -> RegionConfig:
    """What to make for ``geometry``.  Raises ValueError naming the flag, and NoSpace."""
    published = plan_geometry(
        geometry,
        data_bytes=config.data_bytes,
        swa_ratio=config.swa_ratio,
        mamba_ratio=config.mamba_ratio,
        slot_align=config.slot_align,
        register_chunk_tokens=config.register_chunk_tokens,
    )
    plan = _region_config(config, published)
    try:
        check_space(_need(plan), config, machine)
    except NoSpace as error:
        if not (plan.hugepage_path and config.hugepage_fallback):
            raise
        log.warning("falling back to normal pages: %s", error)
        plan = replace(plan, hugepage_path="")
        check_space(_need(plan), config, machine)
    return plan


def build_regions(
    config: ServerConfig, plan: RegionConfig, access: Access, machine: Machine, progress: Progress
) -> Index:
    """Make, prefault and publish the regions of ``plan``, then join them.  Leaves nothing when it raises."""
    how = Prefault(config.prefault, config.prefault_threads, numa_nodes(config, machine))
    create_regions(config.name, plan, access, how, progress)
    try:
        return join_regions(config.name)
    except BaseException:
        retire_regions(config.name)
        raise


def join_regions(name: str) -> Index:
    """Attach as the server's own client: it reaps, evicts, counts and looks up like any other."""
    with open(open_index(name, own=True), "rb+", buffering=0) as index:
        return Index(index.fileno(), SERVER_LABEL)


def access_of(config: ServerConfig) -> Access:
    """Permissions and group of regions and socket.  ValueError for an unknown group."""
    if not config.group:
        return Access(config.mode)
    try:
        gid = int(config.group) if config.group.isdecimal() else grp.getgrnam(config.group).gr_gid
    except KeyError:
        raise ValueError(f"--group: there is no group {config.group!r}") from None
    if gid > _MAX_GID:
        raise ValueError(f"--group: {gid} is above {_MAX_GID}, the largest group id")
    return Access(config.mode, gid)


def grant_access(config: RegionConfig, name: str, access: Access) -> None:
    """Give adopted regions the permissions that this server was asked for."""
    objects = [(name, "")]
    if config.data_bytes:
        objects.append((config.data_name, config.hugepage_path))
    for object_name, hugepage_path in objects:
        fd = open_object(object_name, hugepage_path, own=True)
        try:
            if access.gid is not None:
                os.fchown(fd, -1, access.gid)
            os.fchmod(fd, access.mode)
        finally:
            os.close(fd)


def _region_config(config: ServerConfig, published: PublishedGeometry) -> RegionConfig:
    return RegionConfig(
        published,
        data_bytes=config.data_bytes,
        swa_ratio=config.swa_ratio,
        mamba_ratio=config.mamba_ratio,
        data_name=config.resolved_data_name,
        hugepage_path=config.hugepage_path if config.data_bytes else "",
        evict_policy=config.evict_policy,
        max_clients=config.max_clients,
        pins_per_client=config.pins_per_client,
        event_capacity=config.kvevent_ring_capacity,
        reap_quarantine_s=config.reap_quarantine_s,
    )


def _need(plan: RegionConfig) -> Need:
    _, index_bytes, store_bytes = plan_files(plan)
    if plan.hugepage_path:
        return Need(index_bytes, huge_bytes=store_bytes)
    return Need(index_bytes + store_bytes)
