"""Chunks, rollback and the driver's error, with a driver that is a list."""

from __future__ import annotations

import pytest

from flexkv_radix.transfer.pinning import PinnedRange, chunk_ends, cuts_a_slot
from flexkv_radix.transfer.protocol import PoolSpec
from radixshmem.geometry import ComponentType

FULL, SWA = ComponentType.FULL, ComponentType.SWA
PAGE = 4096


class Driver:
    def __init__(self, refused_address: int | None = None) -> None:
        self.held: dict[int, int] = {}
        self._refused = refused_address

    def register(self, address: int, num_bytes: int) -> None:
        if address == self._refused:
            raise MemoryError("refused")
        self.held[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.held[address]


def test_chunks_cover_the_range_once() -> None:
    driver = Driver()
    pinned = PinnedRange(1000, [100, 200, 250], driver.register, driver.unregister)
    assert driver.held == {1000: 100, 1100: 100, 1200: 50}
    pinned.close()
    pinned.close()
    assert driver.held == {}


@pytest.mark.parametrize("refused", [1000, 1100, 1200])
def test_a_refused_chunk_gives_back_the_others_and_passes_the_error_on(refused: int) -> None:
    driver = Driver(refused)
    with pytest.raises(MemoryError, match="refused"):
        PinnedRange(1000, [100, 200, 250], driver.register, driver.unregister)
    assert driver.held == {}


def test_a_small_store_is_one_chunk() -> None:
    assert chunk_ends(100 * PAGE, [PoolSpec(FULL, PAGE, 10, PAGE, PAGE)]) == [100 * PAGE]


@pytest.mark.parametrize("stride", [PAGE, 3 * PAGE, PAGE + 512, 5 * PAGE // 4])
def test_chunks_end_between_slots(stride: int) -> None:
    full = PoolSpec(FULL, PAGE, 4000, stride, stride)
    swa_start = -(-(PAGE + 4000 * stride) // PAGE) * PAGE
    pools = [full, PoolSpec(SWA, swa_start, 1000, 2 * PAGE, PAGE)]
    num_bytes = swa_start + 1000 * 2 * PAGE
    ends = chunk_ends(num_bytes, pools, chunk_bytes=100 * PAGE)
    assert ends[-1] == num_bytes
    assert all(end % PAGE == 0 for end in ends)
    assert all(0 < end - start <= 100 * PAGE for start, end in zip((0, *ends), ends, strict=False))
    assert not cuts_a_slot(ends, pools)


def test_slots_that_share_no_boundary_with_pages_are_cut() -> None:
    pools = [PoolSpec(FULL, PAGE, 4000, PAGE + 1, PAGE)]
    ends = chunk_ends(pools[0].offset_bytes + 4000 * (PAGE + 1), pools, chunk_bytes=100 * PAGE)
    assert all(end % PAGE == 0 for end in ends[:-1])
    assert cuts_a_slot(ends, pools)
