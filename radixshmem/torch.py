"""Torch views of the SlotStore.  The only module of the package that imports torch."""

from __future__ import annotations

import torch

from radixshmem.geometry import ComponentType
from radixshmem.store import SlotStore


def pool_tensor(store: SlotStore, component: ComponentType, dtype: torch.dtype) -> torch.Tensor:
    """``store.array(component)`` as a tensor [num_slots, slot_bytes // itemsize] over the same bytes.

    ValueError when ``dtype`` does not divide the stride or its items would lie unaligned.
    """
    pool, item_bytes = store.pool(component), dtype.itemsize
    if pool.slot_bytes % item_bytes or pool.offset % item_bytes:
        raise ValueError(
            f"dtype: {dtype} does not fit slots of {pool.slot_bytes} bytes that begin at byte {pool.offset}"
        )
    return torch.from_numpy(store.array(component)).view(dtype)
