from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from regions import region

from radixshmem import ComponentType, CorruptRegion, Geometry, RadixError, RegionRetired, SlotStore
from radixshmem.names import default_data_name
from radixshmem.region import object_path
from radixshmem.store_header import TABLE_OFFSET

FULL, SWA, MAMBA = ComponentType
GEOMETRY = Geometry(16, 5000, swa_slot_bytes=700, swa_window_blocks=4, slot_align=512)


@pytest.fixture
def data_name() -> Iterator[str]:
    with region(GEOMETRY, data_bytes=1 << 20, swa_ratio=0.25) as name:
        yield default_data_name(name)


@pytest.fixture
def store(data_name: str) -> Iterator[SlotStore]:
    store = SlotStore.attach(data_name)
    yield store
    store.close()


def test_pools_are_as_planned(store: SlotStore, data_name: str) -> None:
    assert (store.name, store.is_hugepage) == (data_name, False)
    num_swa = (1 << 18) // 1024
    assert store.pool(SWA)[:2] == (num_swa, 1024)
    full = store.pool(FULL)
    assert (full.num_slots, full.slot_bytes) == (((1 << 20) - num_swa * 1024) // 5120, 5120)
    assert full.offset % 512 == 0
    assert full.offset >= 4096
    assert store.pool(SWA).offset >= full.offset + full.num_slots * full.slot_bytes
    assert store.has_pool(SWA)
    assert not store.has_pool(MAMBA)
    with pytest.raises(ValueError, match="MAMBA"):
        store.pool(MAMBA)
    with pytest.raises(ValueError, match=r"component: .* no 9 pool"):
        store.array(9)  # type: ignore[arg-type]


def test_all_views_show_the_same_bytes(store: SlotStore) -> None:
    for component in (FULL, SWA):
        pool, array = store.pool(component), store.array(component)
        assert array.shape == (pool.num_slots, pool.slot_bytes)
        assert array.dtype == np.uint8
        last = pool.num_slots - 1
        array[last] = 7
        view = store.slot_view(last, component)
        assert (len(view), view.readonly) == (pool.slot_bytes, False)
        assert bytes(view) == bytes([7]) * pool.slot_bytes
        view[0] = 9
        assert store.data_view()[pool.offset + last * pool.slot_bytes] == 9
        assert not array[:last].any()


def test_another_mapping_shows_the_same_bytes(store: SlotStore, data_name: str) -> None:
    other = SlotStore.attach(data_name)
    store.slot_view(3)[10] = 42
    assert other.slot_view(3)[10] == 42
    other.close()


@pytest.mark.parametrize("slot", [-1, 10**9])
def test_a_slot_out_of_range(store: SlotStore, slot: int) -> None:
    with pytest.raises(IndexError, match=str(slot)):
        store.slot_view(slot)
    with pytest.raises(IndexError):
        store.slot_view(store.pool(SWA).num_slots, SWA)


@pytest.mark.parametrize("slot", [None, "0", 0.5, [0]])
def test_a_slot_is_an_integer(store: SlotStore, slot: Any) -> None:
    with pytest.raises(TypeError, match="slot"):
        store.slot_view(slot)


@pytest.mark.parametrize("component", [None, "FULL", [0], {}])
def test_a_component_is_an_integer(store: SlotStore, component: Any) -> None:
    for call in (store.pool, store.array):
        with pytest.raises(TypeError, match="component"):
            call(component)


def test_attach_names_the_argument(data_name: str) -> None:
    with pytest.raises(TypeError, match="hugepage_path"):
        SlotStore.attach(data_name, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout_ms"):
        SlotStore.attach(data_name, timeout_ms=None)  # type: ignore[arg-type]


def test_views_outlive_close(store: SlotStore) -> None:
    view, array = store.slot_view(0), store.array(FULL)
    view[0] = 5
    store.close()
    store.close()
    assert (view[0], array[0, 0]) == (5, 5)
    with pytest.raises(RadixError, match="closed"):
        store.slot_view(0)


def test_the_mapping_stays_out_of_core_dumps(store: SlotStore, data_name: str) -> None:
    maps = Path("/proc/self/smaps").read_text()
    entry = maps[maps.index(object_path(data_name)) :]
    flags = next(line for line in entry.splitlines() if line.startswith("VmFlags"))
    assert "dd" in flags.split()


def test_attach_waits_for_the_store(shm_name: str) -> None:
    with pytest.raises(TimeoutError, match=f"{shm_name}.*50 ms"):
        SlotStore.attach(shm_name, timeout_ms=50)


def test_attach_returns_once_it_is_ready(data_name: str, shm_name: str) -> None:
    def publish() -> None:
        time.sleep(0.05)
        os.rename(object_path(data_name), object_path(shm_name))

    thread = threading.Thread(target=publish)
    thread.start()
    store = SlotStore.attach(shm_name, timeout_ms=30_000)
    thread.join()
    assert store.has_pool(FULL)
    store.close()
    os.rename(object_path(shm_name), object_path(data_name))


def test_a_retired_store_is_refused_at_once(data_name: str, shm_name: str) -> None:
    os.link(object_path(data_name), object_path(shm_name))
    SlotStore.destroy(data_name)
    assert not Path(object_path(data_name)).exists()
    with pytest.raises(RegionRetired):
        SlotStore.attach(shm_name)
    SlotStore.destroy(data_name)


def test_a_bad_name_is_refused() -> None:
    for action in (SlotStore.attach, SlotStore.destroy):
        with pytest.raises(ValueError, match="name"):
            action("no slash")


@pytest.mark.parametrize(
    "damage",
    [
        (0, b"\0" * 8),  # no header
        (TABLE_OFFSET, b"\0" * 8),  # no table
        (TABLE_OFFSET + 8, struct.pack("<I", 2**31)),  # more slots than bytes
        (TABLE_OFFSET + 24, struct.pack("<Q", 2**63)),  # a stride that overflows
        (TABLE_OFFSET + 32, struct.pack("<Q", 2**62)),  # a pool behind the end
    ],
)
def test_a_damaged_header_is_refused(data_name: str, damage: tuple[int, bytes]) -> None:
    offset, bytes_ = damage
    with open(object_path(data_name), "r+b") as file:
        file.seek(offset)
        file.write(bytes_)
    with pytest.raises(CorruptRegion):
        SlotStore.attach(data_name, timeout_ms=0)


def test_a_truncated_store_is_refused(data_name: str) -> None:
    os.truncate(object_path(data_name), 8192)
    with pytest.raises(CorruptRegion):
        SlotStore.attach(data_name, timeout_ms=0)


@pytest.fixture
def hugepage_path(tmp_path: Path) -> Iterator[str]:
    """A hugetlbfs of its own; needs root, the right to mount, and 8 free huge pages."""
    meminfo = Path("/proc/meminfo").read_text().split()
    if int(meminfo[meminfo.index("HugePages_Free:") + 1]) < 8:
        pytest.skip("fewer than 8 huge pages are free")
    if os.system(f"mount -t hugetlbfs none {tmp_path}") != 0:
        pytest.skip("hugetlbfs may not be mounted here")
    yield str(tmp_path)
    os.system(f"umount {tmp_path}")


def test_a_store_on_huge_pages(hugepage_path: str) -> None:
    with region(GEOMETRY, data_bytes=8 << 20, swa_ratio=0.25, hugepage_path=hugepage_path) as name:
        data_name = default_data_name(name)
        assert os.listdir(hugepage_path) == [data_name[1:]]
        store = SlotStore.attach(data_name, hugepage_path)
        assert store.is_hugepage
        assert store.pool(FULL).offset >= 1 << 21
        store.array(FULL)[-1] = 3
        assert bytes(store.slot_view(store.pool(FULL).num_slots - 1)) == bytes([3]) * 5120
        store.close()
    assert os.listdir(hugepage_path) == []
