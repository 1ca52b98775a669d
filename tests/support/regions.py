"""Real regions for tests, made without a server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixshmem.geometry import Geometry, plan_geometry
from radixshmem.index import Index
from radixshmem.names import default_data_name
from radixshmem.records import RegionConfig
from radixshmem.region import create_regions, open_index, retire_regions

_numbers = itertools.count()


def unique_name() -> str:
    """A server name that no other test uses."""
    return f"/t_radix_{os.getpid()}_{next(_numbers)}"


def leftovers(name: str) -> list[str]:
    """Objects of ``name`` that are still in /dev/shm."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"{name[1:]}*"))


def remove_leftovers(name: str) -> None:
    for left in leftovers(name):
        Path("/dev/shm", left).unlink(missing_ok=True)


@contextmanager
def region(
    geometry: Geometry,
    *,
    data_bytes: int = 0,
    swa_ratio: float = 0.0,
    mamba_ratio: float = 0.0,
    event_capacity: int = 4096,
    pins_per_client: int = 64,
    evict_policy: str = "lru",
    hugepage_path: str = "",
) -> Iterator[str]:
    """Name of a READY region; its invariants are proved and it is removed at the end."""
    name = unique_name()
    plan = plan_geometry(geometry, data_bytes=data_bytes, swa_ratio=swa_ratio, mamba_ratio=mamba_ratio)
    config = RegionConfig(
        plan,
        data_bytes=data_bytes,
        swa_ratio=swa_ratio,
        mamba_ratio=mamba_ratio,
        data_name=default_data_name(name) if data_bytes else "",
        event_capacity=event_capacity,
        pins_per_client=pins_per_client,
        evict_policy=evict_policy,
        hugepage_path=hugepage_path,
        max_clients=16,
    )
    try:
        create_regions(name, config)
        yield name
        prove_invariants(name)
    finally:
        retire_regions(name)
        assert leftovers(name) == []


def attach(name: str, label: str = "test") -> Index:
    """Join the region ``name``."""
    fd = open_index(name)
    try:
        return Index(fd, label)
    finally:
        os.close(fd)


def prove_invariants(name: str) -> None:
    """Fail with the checker's report unless every invariant of the region holds."""
    index = attach(name, "checker")
    try:
        violations, report = index.snapshot().check()
    finally:
        index.close()
    assert violations == 0, report
