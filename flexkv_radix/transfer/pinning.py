"""Pins the SlotStore for devices, in chunks, all or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flexkv_radix.transfer.protocol import PoolSpec

# One registration of a terabyte takes minutes and fails as a whole.
CHUNK_BYTES = 64 << 30
_PAGE_BYTES = 4096


def chunk_ends(num_bytes: int, pools: Sequence[PoolSpec], chunk_bytes: int = CHUNK_BYTES) -> list[int]:
    """Where chunks of at most chunk_bytes end: between two slots if pages allow it."""
    ends: list[int] = []
    start = 0
    while num_bytes - start > chunk_bytes:
        start = _last_cut(start, start + chunk_bytes, pools)
        ends.append(start)
    return [*ends, num_bytes]


def _last_cut(low: int, high: int, pools: Sequence[PoolSpec]) -> int:
    """The last boundary of a slot in (low, high] that is one of a page too; high if there is none."""
    for pool in pools:
        step_bytes = math.lcm(pool.stride_bytes, _PAGE_BYTES)
        num_steps = (high - pool.offset_bytes) // step_bytes
        cut = pool.offset_bytes + num_steps * step_bytes
        is_inside = 0 <= num_steps * step_bytes <= _pool_bytes(pool)
        if pool.offset_bytes % _PAGE_BYTES == 0 and low < cut and is_inside:
            return cut
    return high


def cuts_a_slot(ends: Sequence[int], pools: Sequence[PoolSpec]) -> bool:
    """Whether a slot lies in two chunks: kernels do not mind, copy engines do."""
    return any(
        0 < end - pool.offset_bytes < _pool_bytes(pool) and (end - pool.offset_bytes) % pool.stride_bytes
        for end in ends
        for pool in pools
    )


def _pool_bytes(pool: PoolSpec) -> int:
    return pool.num_slots * pool.stride_bytes


class PinnedRange:
    """The bytes from address on, registered chunk by chunk up to the last of ends, until close().

    register(address, num_bytes) and unregister(address) are the driver's.  If a chunk is refused,
    those before it are given back and the driver's error is passed on.
    """

    def __init__(
        self,
        address: int,
        ends: Sequence[int],
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
    ) -> None:
        self._unregister = unregister
        self._chunks: list[int] = []
        try:
            for start, end in zip((0, *ends), ends, strict=False):
                register(address + start, end - start)
                self._chunks.append(address + start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self._chunks:
            self._unregister(self._chunks.pop())
