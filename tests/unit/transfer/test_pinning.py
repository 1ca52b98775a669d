"""Chunks, rollback and the driver's error, with a driver that is a list."""

from __future__ import annotations

import pytest

from flexkv_radix.transfer.pinning import PinnedRange


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
    pinned = PinnedRange(1000, 250, driver.register, driver.unregister, chunk_bytes=100)
    assert driver.held == {1000: 100, 1100: 100, 1200: 50}
    pinned.close()
    pinned.close()
    assert driver.held == {}


@pytest.mark.parametrize("refused", [1000, 1100, 1200])
def test_a_refused_chunk_gives_back_the_others_and_passes_the_error_on(refused: int) -> None:
    driver = Driver(refused)
    with pytest.raises(MemoryError, match="refused"):
        PinnedRange(1000, 250, driver.register, driver.unregister, chunk_bytes=100)
    assert driver.held == {}
