"""Chained block hashes: a block's hash covers its whole prefix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixshmem import _native
from radixshmem.arrays import U64Array, as_tokens


def hash_blocks(
    tokens: NDArray[np.integer], block_size: int, prefix: NDArray[np.integer] | None = None
) -> U64Array:
    """XXH64 (seed 0) of every whole block of ``tokens``, each digest covering all blocks before it.

    ``tokens``: [n] token ids, taken as int64; a rest of fewer than ``block_size`` tokens is ignored.
    ``prefix``: int64 words fed before the first token (a namespace).  Returns uint64 [n // block_size].
    Runs without the GIL.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)):
        raise TypeError(f"block_size must be an int, not {type(block_size).__name__}")
    if not 1 <= block_size < 2**32:
        raise ValueError(f"block_size must be at least 1 and below 2**32, is {block_size}")
    words = None if prefix is None else as_tokens(prefix, "prefix")
    return _native.hash_blocks(as_tokens(tokens, "tokens"), int(block_size), words)
