"""Who holds the index lock at this moment, and whether a batch is half done, read from the region."""

from __future__ import annotations

import mmap
import os

import numpy as np

from radixshmem._native import ffi
from radixshmem.region import open_index

_LINE = 64
_WAITERS = 1 << 31
# rs_header_shm (csrc/layout.h): magic, layout_version and abi, region_bytes; config; then `state`,
# `lock_word`, `seq` and `journal_len`, each at the start of a cache line.
_STATE_OFFSET = -(-(24 + ffi.sizeof("rs_config")) // _LINE) * _LINE
LOCK_WORD_OFFSET = _STATE_OFFSET + _LINE
JOURNAL_LEN_OFFSET = _STATE_OFFSET + 3 * _LINE


class LockWord:
    def __init__(self, name: str) -> None:
        fd = open_index(name)
        try:
            memory = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._word = np.frombuffer(memory, np.uint32, 1, LOCK_WORD_OFFSET)
        self._journal_len = np.frombuffer(memory, np.uint32, 1, JOURNAL_LEN_OFFSET)

    def owner(self) -> int:
        """Slot of the client that holds the lock, or -1."""
        return (int(self._word[0]) & ~_WAITERS) - 1

    def batch_is_open(self) -> bool:
        """Whether the journal holds what a death now would undo."""
        return bool(self._journal_len[0])
