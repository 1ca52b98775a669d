"""Prompts and the bytes of their blocks, both made from numbers alone so that any process can check them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixshmem import ComponentType, Geometry

SLOT_BYTES = 256
WORDS = SLOT_BYTES // 8
SWA_WINDOW = 6
GEOMETRY = Geometry(
    16,
    SLOT_BYTES,
    swa_slot_bytes=SLOT_BYTES,
    swa_window_blocks=SWA_WINDOW,
    mamba_slot_bytes=SLOT_BYTES,
    slot_align=SLOT_BYTES,
    fingerprint="torture",
)
NUM_FAMILIES, NUM_BRANCHES = 12, 6
MAX_BLOCKS, SHARED_BLOCKS = 300, 80

U64 = NDArray[np.uint64]
_SPREAD = np.arange(1, 2 * WORDS, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_SALTS = {component: np.uint64(component * 0xD1B54A32D192ED03 % (1 << 64)) for component in ComponentType}


def prompt(family: int, branch: int, num_blocks: int) -> U64:
    """Hashes of a prompt; its first SHARED_BLOCKS are its family's.  A hash names one place in the tree."""
    depth = np.arange(num_blocks, dtype=np.uint64)
    key = np.where(depth < SHARED_BLOCKS, family * 1000, family * 1000 + branch + 1).astype(np.uint64)
    mixed = (key * np.uint64(0xBF58476D1CE4E5B9)) ^ (depth * np.uint64(0x94D049BB133111EB) + np.uint64(1))
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0x9E3779B97F4A7C15)


def contents(hashes: U64, component: ComponentType) -> U64:
    """What the slots of these blocks hold, uint64 [n, WORDS]."""
    return (hashes ^ _SALTS[component])[:, None] * _SPREAD
