"""Block hashes of token ids, FlexKV's chain: equal to what FlexKV computes for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from radixshmem.hashing import hash_blocks

Namespace = Sequence[str] | None

_WEIGHTS = "weights="


def hash_tokens(
    token_ids: npt.NDArray[np.int64], tokens_per_block: int, namespace: Namespace = None
) -> npt.NDArray[np.uint64]:
    """Hash of every whole block; each covers the namespace and all tokens up to the block's end."""
    names = _names(namespace)
    return hash_blocks(token_ids, tokens_per_block, namespace_words(names) if names else None)


def names_within(weights: str, namespace: Namespace) -> tuple[str, ...]:
    """A caller's namespace within that of a version of the weights, "" for those that an engine starts with.

    No two pairs of arguments give the same names, whatever callers call their namespaces.
    """
    names = _names(namespace)
    if weights or (names and names[0].startswith(_WEIGHTS)):
        return (_WEIGHTS + weights, *names)
    return names


def _names(namespace: Namespace) -> tuple[str, ...]:
    if namespace is None or namespace == ():
        return ()
    if isinstance(namespace, (str, bytes)):  # a sequence of its letters, which nobody means
        raise TypeError(f"namespace: a list of strings expected, pass [{namespace!r}]")
    names = tuple(namespace or ())
    for name in names:
        if not isinstance(name, str) or "\x00" in name:
            raise ValueError(f"namespace: {name!r} is not a string without NUL")
    return names


@lru_cache(maxsize=1024)
def namespace_words(namespace: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """What a non-empty namespace feeds to the hash before the first token: its bytes, a word each.

    Names are joined by NUL, which none of them may contain.
    """
    words = np.frombuffer("\x00".join(namespace).encode(), dtype=np.uint8).astype(np.int64)
    words.setflags(write=False)
    return words
