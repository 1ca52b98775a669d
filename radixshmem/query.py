"""Results of the index verbs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import numpy as np

from radixshmem.arrays import I32Array
from radixshmem.errors import InsertError
from radixshmem.lease import Lease
from radixshmem.records import Pin

Fragment = tuple[int, int, I32Array]
"""(rank, first block, int32 slots of the blocks from there on)."""

_EMPTY: I32Array = np.empty(0, np.int32)
_EMPTY.setflags(write=False)


class InsertResult(NamedTuple):
    """How an insert ended.

    ``unused_slots``: int32, in order, those that did not enter the tree; already recycled unless
    ``auto_recycle`` was off.  After BUSY, with k = num_inserted + len(unused_slots), ``slots[k:]`` are
    still staged.
    """

    error: InsertError
    unused_slots: I32Array
    num_inserted: int


class QueryResult:
    """What a query found and, under ``lock=True``, the pin that keeps it.

    ``status``: 0 OK, else BUSY or PIN_LIMIT with a zero hit (``QueryStatus``).  ``full_hit``: blocks that
    FULL can serve.  ``common_hit``: blocks that every component of the mask can serve; what the pin
    keeps.  ``swa_start``: first block of the SWA window, whose slots are ``swa_slots``.

    A result that is collected before ``finalize`` was called warns and queues its release.
    """

    __slots__ = (
        "__weakref__",
        "_lease",
        "_mamba_slot",
        "_pin",
        "_rank",
        "_slots",
        "_swa_slots",
        "common_hit",
        "full_hit",
        "status",
        "swa_start",
    )

    status: int
    full_hit: int
    common_hit: int
    swa_start: int

    def __init__(
        self,
        lease: Lease | None,
        match: tuple[int, int, int, int, I32Array, I32Array | None, Pin | None],
        rank: int,
    ) -> None:
        """``lease`` is None for a query without a lock; ``match`` is what ``Index.match`` returned."""
        self._lease = lease
        self._rank = rank
        self.status, self.full_hit, self.common_hit, self._mamba_slot, self._slots, swa, self._pin = match
        self._swa_slots = swa
        self.swa_start = self.common_hit if swa is None else self.common_hit - len(swa)

    @property
    def full_fragments(self) -> list[Fragment]:
        """FULL slots of the first ``common_hit`` blocks, as (rank, first_block, int32 slots)."""
        return [(self._rank, 0, self._slots[: self.common_hit])] if self.common_hit else []

    @property
    def swa_slots(self) -> I32Array:
        """SWA slots of blocks ``swa_start`` .. ``common_hit`` - 1; empty without SWA in the mask."""
        return _EMPTY if self._swa_slots is None else self._swa_slots

    @property
    def mamba_slots(self) -> I32Array:
        """The MAMBA slot of block ``common_hit`` - 1, or empty."""
        return _EMPTY if self._mamba_slot < 0 else np.array([self._mamba_slot], np.int32)

    @property
    def finalize(self) -> Callable[[], None] | None:
        """Drops the pin; calling it again does nothing.  None for a query without a lock."""
        return None if self._lease is None else self._release

    def _release(self) -> None:
        pin = self._pin
        if pin is not None and self._lease is not None:
            self._pin = None
            self._lease.release(pin)

    def __enter__(self) -> QueryResult:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def __del__(self) -> None:
        # Runs inside the garbage collector: takes no lock, calls nothing that may.
        pin = getattr(self, "_pin", None)
        if pin is None or self._lease is None or sys.is_finalizing():
            return
        self._pin = None
        self._lease.release_later(pin)
        if not self._lease.index.closed:
            warnings.warn(f"{self!r} was not finalized", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return (
            f"QueryResult(status={self.status}, full_hit={self.full_hit}, common_hit={self.common_hit}, "
            f"swa_start={self.swa_start}, pinned={self._pin is not None})"
        )
