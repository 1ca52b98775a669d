"""Memory that the worker shares with others: the SlotStore and the CPU storages of ranks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from flexkv_radix.transfer.protocol import PoolSpec, StoreSpec
from radixshmem.geometry import ComponentType

_View: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


class SharedMemory:
    """A writable mapping of the first num_bytes of a file."""

    def __init__(self, fd: int, num_bytes: int, name: str) -> None:
        present = os.fstat(fd).st_size
        if present < num_bytes:
            raise ValueError(f"{name}: the file has {present} bytes, {num_bytes} are needed")
        self._map = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._view: _View | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self._view.ctypes.data
        self.num_bytes = num_bytes

    def close(self) -> None:
        self._view = None
        self._map.close()


class MappedStore:
    """The SlotStore file, mapped whole."""

    def __init__(self, spec: StoreSpec) -> None:
        fd = os.open(spec.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(fd).st_size
            _check_pools(spec, num_bytes)
            self._memory = SharedMemory(fd, num_bytes, spec.path)
        finally:
            os.close(fd)
        self.pools = {pool.component: pool for pool in spec.pools}
        self.address = self._memory.address
        self.num_bytes = num_bytes

    def pool(self, component: ComponentType) -> PoolSpec:
        """ValueError when the store has no such pool."""
        pool = self.pools.get(component)
        if pool is None:
            raise ValueError(f"component: the store has no {component.name} pool")
        return pool

    def pool_address(self, component: ComponentType) -> int:
        """Address of the pool's slot 0."""
        return self.address + self.pool(component).offset_bytes

    def close(self) -> None:
        self._memory.close()


def _check_pools(spec: StoreSpec, num_bytes: int) -> None:
    for pool in spec.pools:
        end_bytes = pool.offset_bytes + pool.num_slots * pool.stride_bytes
        if end_bytes > num_bytes:
            raise ValueError(
                f"{spec.path}: the {pool.component.name} pool ends at byte {end_bytes}"
                f" of a file of {num_bytes} bytes"
            )


def map_storages(fds: Sequence[int], sizes_bytes: Sequence[int], name: str) -> list[SharedMemory]:
    """Map one storage per file descriptor, which stay the caller's; all or none."""
    mapped: list[SharedMemory] = []
    try:
        for index, (fd, num_bytes) in enumerate(zip(fds, sizes_bytes, strict=True)):
            mapped.append(SharedMemory(fd, num_bytes, f"{name} storage {index}"))
    except BaseException:
        for memory in mapped:
            memory.close()
        raise
    return mapped
