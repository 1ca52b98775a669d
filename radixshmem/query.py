"""Results of the index verbs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from radixshmem.arrays import I32Array
from radixshmem.errors import InsertError
from radixshmem.index import Match
from radixshmem.lease import Lease

Fragment = tuple[int, int, I32Array]
"""(rank, first block, int32 slots of the blocks from there on)."""


class InsertResult(NamedTuple):
    """How an insert ended.

    ``unused_slots``: int32, in order, those that did not enter the tree; already recycled unless
    ``auto_recycle`` was off.  After BUSY, with k = num_inserted + len(unused_slots), ``slots[k:]`` are
    still staged.
    """

    error: InsertError
    unused_slots: I32Array
    num_inserted: int


class QueryResult(Match):
    """What a query found and, under ``lock=True``, the pin that keeps it.

    A result that is collected before ``finalize`` was called warns and queues its release.
    """

    __slots__ = ("__weakref__", "_is_locked", "_lease")

    def __init__(self, lease: Lease, is_locked: bool) -> None:
        """``Index.match`` fills the result in."""
        self._lease = lease
        self._is_locked = is_locked
        self._pin = None

    @property
    def full_fragments(self) -> list[Fragment]:
        """FULL slots of the first ``common_hit`` blocks, as (rank, first_block, int32 slots)."""
        slots = self.common_slots()
        return [(self._lease.rank, 0, slots)] if len(slots) else []

    @property
    def finalize(self) -> Callable[[], None] | None:
        """Drops the pin; calling it again does nothing.  None for a query without a lock."""
        return self._release if self._is_locked else None

    def _release(self) -> None:
        pin = self._pin
        if pin is not None:
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
        pin = getattr(self, "_pin", None)  # a signal may have ended __init__ before there was one
        if pin is None or sys.is_finalizing() or not self.holds_pin():
            return
        self._lease.release_later(pin)
        if not self._lease.index.closed:
            warnings.warn(f"{self!r} was not finalized", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return (
            f"QueryResult(status={self.status}, full_hit={self.full_hit}, common_hit={self.common_hit}, "
            f"swa_start={self.swa_start}, pinned={self.holds_pin()})"
        )
