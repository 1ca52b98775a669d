"""SlotStore: the mapped pools of slots that hold KV bytes."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from typing import NamedTuple

import numpy as np

from radixshmem import _native
from radixshmem.arrays import U8Array, as_integer, as_number, check_text
from radixshmem.errors import CorruptRegion, RadixError, RegionRetired, ServerNotReady
from radixshmem.geometry import ComponentType, PoolGeometry
from radixshmem.names import check_object_name
from radixshmem.records import RegionState
from radixshmem.region import destroy_store, open_object
from radixshmem.store_header import read_pools

_POLL_S = 0.005


class Pool(NamedTuple):
    """Slots of one component.  ``slot_bytes`` is the stride; ``offset`` that of slot 0 in ``data_view``."""

    num_slots: int
    slot_bytes: int
    offset: int


class SlotStore:
    """A mapping of a SlotStore.  Views stay valid for as long as they are referenced."""

    def __init__(self, fd: int, name: str, is_hugepage: bool) -> None:
        """Map the READY SlotStore open as ``fd``, which stays the caller's.

        Raises CorruptRegion, RegionRetired, ServerNotReady.
        """
        header = _native.store_peek(fd)
        if header.state == RegionState.RETIRED:
            raise RegionRetired(f"the SlotStore {name} was retired")
        if header.state != RegionState.READY:
            raise ServerNotReady(f"the SlotStore {name} is still being built")
        if os.fstat(fd).st_size < header.total_bytes:
            raise CorruptRegion(f"the SlotStore {name} is shorter than its {header.total_bytes} bytes")
        pools = read_pools(fd, header.total_bytes)
        self.name = name
        self.is_hugepage = is_hugepage
        self.epoch = header.epoch
        self._pools = {pool.component: pool for pool in pools}
        self._mapping = mmap.mmap(fd, header.total_bytes)
        with contextlib.suppress(OSError):  # a core dump without it is big, not wrong
            self._mapping.madvise(mmap.MADV_DONTDUMP)

    @classmethod
    def attach(cls, name: str, hugepage_path: str = "", timeout_ms: int = 5000) -> SlotStore:
        """Map the SlotStore ``name``, waiting up to ``timeout_ms`` for it to be there and READY.

        Raises TimeoutError, CorruptRegion, RegionRetired, and RadixError for an untrusted owner.
        """
        check_object_name(name, "name")
        check_text(hugepage_path, "hugepage_path")
        deadline = time.monotonic() + as_number(timeout_ms, "timeout_ms") / 1000
        while True:
            try:
                fd = open_object(name, hugepage_path)
                try:
                    return cls(fd, name, bool(hugepage_path))
                finally:
                    os.close(fd)
            except (FileNotFoundError, ServerNotReady, CorruptRegion) as error:
                # An object that is being made has no header yet and looks corrupt.
                if time.monotonic() >= deadline:
                    if isinstance(error, CorruptRegion):
                        raise
                    raise TimeoutError(
                        f"no READY SlotStore {name} within {timeout_ms} ms: {error}"
                    ) from error
            time.sleep(_POLL_S)

    @staticmethod
    def destroy(name: str, hugepage_path: str = "") -> None:
        """Retire the SlotStore ``name`` and remove it; nothing there is no error.

        Mappings stay valid.  Only this process's own user's objects are removed.
        """
        destroy_store(check_object_name(name, "name"), check_text(hugepage_path, "hugepage_path"))

    def has_pool(self, component: ComponentType) -> bool:
        """Whether there are slots of ``component``."""
        return component in self._pools

    def pool(self, component: ComponentType) -> Pool:
        """The pool of ``component``; ValueError when the geometry has none."""
        pool = self._geometry(component)
        return Pool(pool.num_slots, pool.stride, pool.offset)

    def data_view(self) -> memoryview:
        """All bytes of the file, header page included; pools begin at their ``offset``."""
        return memoryview(self._live())

    def array(self, component: ComponentType) -> U8Array:
        """Writable uint8 [num_slots, slot_bytes] over the pool, without a copy."""
        pool = self.pool(component)
        flat: U8Array = np.frombuffer(self._live(), np.uint8, pool.num_slots * pool.slot_bytes, pool.offset)
        return flat.reshape(pool.num_slots, pool.slot_bytes)

    def slot_view(self, slot: int, component: ComponentType = ComponentType.FULL) -> memoryview:
        """Writable bytes of one slot, ``slot_bytes`` long; IndexError when there is no such slot."""
        pool = self._geometry(component)
        slot = as_integer(slot, "slot")
        if not 0 <= slot < pool.num_slots:
            raise IndexError(f"slot {slot} is not in [0, {pool.num_slots}) of the {pool.component.name} pool")
        start = pool.offset + slot * pool.stride
        return memoryview(self._live())[start : start + pool.stride]

    def close(self) -> None:
        """Unmap as soon as no view is left.  A second call does nothing."""
        mapping, self._mapping = self._mapping, None  # type: ignore[assignment]
        if mapping is not None:
            with contextlib.suppress(BufferError):  # the last view unmaps it
                mapping.close()

    def _geometry(self, component: ComponentType) -> PoolGeometry:
        try:
            return self._pools[ComponentType(as_integer(component, "component"))]
        except (KeyError, ValueError):
            raise ValueError(f"component: the SlotStore {self.name} has no {component!r} pool") from None

    def _live(self) -> mmap.mmap:
        if self._mapping is None:
            raise RadixError(f"the SlotStore {self.name} is closed")
        return self._mapping
