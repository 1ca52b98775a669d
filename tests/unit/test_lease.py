from __future__ import annotations

from collections.abc import Iterator

import pytest
from frozen import frozen_index
from regions import attach, region

from radixshmem import ClientClosed, Geometry, RegionRetired
from radixshmem.geometry import plan_geometry
from radixshmem.index import Index
from radixshmem.lease import Lease
from radixshmem.records import RegionConfig
from radixshmem.region import create_regions, retire_regions


@pytest.fixture
def name() -> Iterator[str]:
    with region(Geometry(16, 64, full_slots=100)) as name:
        yield name


@pytest.fixture
def index(name: str) -> Iterator[Index]:
    index = attach(name)
    yield index
    index.close()


def test_slots_given_back_twice_do_not_keep_the_others(name: str, index: Index) -> None:
    lease = Lease(index)
    slots, _ = index.allocate(0, 10)
    with frozen_index(name):
        lease.recycle(0, slots)
    index.recycle(0, slots[3:5])
    lease.drain()
    assert index.num_free(0) == 100
    assert not lease.queue


def test_draining_while_busy_loses_nothing(name: str, index: Index) -> None:
    lease = Lease(index)
    slots, _ = index.allocate(0, 10)
    with frozen_index(name):
        lease.recycle(0, slots[:5])
        lease.recycle(0, slots[5:])
        lease.drain()
        assert len(lease.queue) == 2
    lease.drain()
    assert index.num_free(0) == 100


def test_a_retired_region_keeps_the_queue(shm_name: str) -> None:
    create_regions(shm_name, RegionConfig(plan_geometry(Geometry(16, 64, full_slots=4)), max_clients=4))
    index = attach(shm_name)
    lease = Lease(index)
    slots, _ = index.allocate(0, 2)
    with frozen_index(shm_name):
        lease.recycle(0, slots)
    retire_regions(shm_name)
    with pytest.raises(RegionRetired):
        lease.drain()
    assert len(lease.queue) == 1
    index.close()
    with pytest.raises(ClientClosed):
        lease.drain()
