"""Block hashes for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixshmem import hash_blocks


def path_of(num_blocks: int, name: int = 0) -> NDArray[np.uint64]:
    """Hashes of a path of its own: paths of different names share no block."""
    return hash_blocks(np.arange(num_blocks, dtype=np.int64), 1, np.array([name], np.int64))


def branch_of(num_shared: int, num_blocks: int, name: int, branch: int) -> NDArray[np.uint64]:
    """A path that shares its first ``num_shared`` blocks with ``path_of(..., name)``."""
    tokens = np.arange(num_blocks, dtype=np.int64)
    tokens[num_shared:] += 1_000_000 * (branch + 1)
    return hash_blocks(tokens, 1, np.array([name], np.int64))
