"""The pool table and the owner in a SlotStore's header page.

The core writes identity and state at the start of the page.  The table behind it lets a process
that only moves bytes (a transfer worker) attach without the index::

    offset 2048   8 bytes   "rdxpools"
    offset 2056   3 entries of FULL, SWA, MAMBA: num_slots u32, window_blocks u32,
                            slot_bytes u64, stride u64, offset u64; num_slots 0: no such pool
    offset 3072   8 bytes   "rdxowner"
    offset 3080   128 bytes name of the server that made the SlotStore, the rest zero
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable

from radixshmem.errors import CorruptRegion
from radixshmem.geometry import ComponentType, PoolGeometry

TABLE_OFFSET = 2048  # well behind the core's header, well before the page ends
_MAGIC = b"rdxpools"
_ENTRY = struct.Struct("<IIQQQ")
OWNER_OFFSET = 3072
_OWNER_MAGIC = b"rdxowner"
_OWNER = struct.Struct("128s")


def write_pools(fd: int, header_bytes: int, pools: Iterable[PoolGeometry]) -> None:
    """Store the table in the header page of ``header_bytes``; ``pools`` have their offsets."""
    entries = {pool.component: pool for pool in pools}
    table = _MAGIC
    for component in ComponentType:
        pool = entries.get(component)
        table += (
            _ENTRY.pack(pool.num_slots, pool.window_blocks, pool.slot_bytes, pool.stride, pool.offset)
            if pool
            else bytes(_ENTRY.size)
        )
    with mmap.mmap(fd, header_bytes) as page:  # hugetlbfs knows no write()
        page[TABLE_OFFSET : TABLE_OFFSET + len(table)] = table


def write_owner(fd: int, header_bytes: int, name: str) -> None:
    """Store in the header page of ``header_bytes`` that the server ``name`` made the SlotStore."""
    owner = _OWNER_MAGIC + _OWNER.pack(name.encode())
    with mmap.mmap(fd, header_bytes) as page:
        page[OWNER_OFFSET : OWNER_OFFSET + len(owner)] = owner


def read_owner(fd: int) -> str:
    """Name of the server that made the SlotStore open as ``fd``; "" if it is none, or not that far yet."""
    owner = os.pread(fd, len(_OWNER_MAGIC) + _OWNER.size, OWNER_OFFSET)
    if len(owner) < len(_OWNER_MAGIC) + _OWNER.size or not owner.startswith(_OWNER_MAGIC):
        return ""
    return owner[len(_OWNER_MAGIC) :].rstrip(b"\0").decode(errors="replace")


def read_pools(fd: int, total_bytes: int) -> tuple[PoolGeometry, ...]:
    """The pools that exist, each proved to lie inside the file's ``total_bytes``.

    Raises CorruptRegion for anything that cannot be.
    """
    table = os.pread(fd, len(_MAGIC) + 3 * _ENTRY.size, TABLE_OFFSET)
    if len(table) < len(_MAGIC) + 3 * _ENTRY.size or not table.startswith(_MAGIC):
        raise CorruptRegion("the SlotStore has no pool table")
    pools = []
    for component in ComponentType:
        num_slots, window, slot_bytes, stride, offset = _ENTRY.unpack_from(
            table, len(_MAGIC) + component * _ENTRY.size
        )
        if not num_slots:
            continue
        if not 0 < slot_bytes <= stride or offset + num_slots * stride > total_bytes:
            raise CorruptRegion(f"the SlotStore's {component.name} pool reaches out of the file")
        pools.append(PoolGeometry(component, num_slots, slot_bytes, stride, window, offset))
    return tuple(pools)
