"""Who holds the index lock at this moment, read from the region."""

from __future__ import annotations

import mmap

import numpy as np

from radixshmem._native import ffi
from radixshmem.region import open_index

_LINE = 64
_WAITERS = 1 << 31
# rs_header_shm (csrc/layout.h): magic, layout_version and abi, region_bytes; config; then `state` and
# `lock_word`, each at the start of a cache line.
_STATE_OFFSET = -(-(24 + ffi.sizeof("rs_config")) // _LINE) * _LINE
LOCK_WORD_OFFSET = _STATE_OFFSET + _LINE


class LockWord:
    def __init__(self, name: str) -> None:
        import os

        fd = open_index(name)
        try:
            self._memory = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._word = np.frombuffer(self._memory, np.uint32, 1, LOCK_WORD_OFFSET)

    def owner(self) -> int:
        """Slot of the client that holds the lock, or -1."""
        return (int(self._word[0]) & ~_WAITERS) - 1
