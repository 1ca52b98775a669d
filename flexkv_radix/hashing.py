"""Block hashes of token ids, FlexKV's chain: equal to what FlexKV computes for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from radixshmem.hashing import hash_blocks

Namespace = Sequence[str] | None


def hash_tokens(
    token_ids: npt.NDArray[np.int64], tokens_per_block: int, namespace: Namespace = None
) -> npt.NDArray[np.uint64]:
    """Hash of every whole block; each covers the namespace and all tokens up to the block's end."""
    return hash_blocks(token_ids, tokens_per_block, namespace_words(tuple(namespace)) if namespace else None)


@lru_cache(maxsize=1024)
def namespace_words(namespace: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """What a non-empty namespace feeds to the hash before the first token: its bytes, a word each.

    Names are joined by NUL, so none may contain it; ValueError otherwise.
    """
    for name in namespace:
        if not isinstance(name, str) or "\x00" in name:
            raise ValueError(f"namespace: {name!r} is not a string without NUL")
    words = np.frombuffer("\x00".join(namespace).encode(), dtype=np.uint8).astype(np.int64)
    words.setflags(write=False)
    return words
