"""What one attach holds, and the releases that could not be done at once.

A release can be due where nothing may block or lock: in the garbage collector, which may run in the
middle of any other Python code, or while the index is busy.  It is queued then, and the next verb
does it.  Nothing is lost: a queue lives as long as its attach, and detaching gives everything back.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from radixshmem.arrays import I32Array
from radixshmem.errors import RadixError
from radixshmem.index import Index, Pin


class StagedSlots(NamedTuple):
    """Slots of one component that were given back but are still staged."""

    component: int
    slots: I32Array


class Lease:
    """Releases pins and staged slots of ``index``.

    Assumes: a deque's ``append``, ``popleft`` and truth are atomic.
    """

    __slots__ = ("index", "queue", "rank")

    def __init__(self, index: Index, rank: int = 0) -> None:
        """``rank``: of this node in its cluster."""
        self.index = index
        self.rank = rank
        # Releases that wait for the next verb, which tests this before it calls drain().
        self.queue: deque[Pin | StagedSlots] = deque()

    def release(self, pin: Pin) -> bool:
        """Drop ``pin`` now or, if the index is busy, with the next verb.  Returns whether it went now."""
        if self.index.release(pin):
            return True
        self.queue.append(pin)
        return False

    def release_later(self, pin: Pin) -> None:
        """Drop ``pin`` with the next verb.  Safe anywhere, also inside the garbage collector."""
        self.queue.append(pin)

    def recycle(self, component: int, slots: I32Array) -> bool:
        """Give staged slots back; what a busy index leaves goes with the next verb.

        Returns whether all went now.  ValueError, and nothing changed, when one of them is not this client's.
        """
        num_done = self.index.recycle(component, slots)
        if num_done == len(slots):
            return True
        self.queue.append(StagedSlots(component, slots[num_done:].copy()))
        return False

    def drain(self) -> None:
        """Do what is queued now, up to the first that finds the index busy: a verb waits for it once."""
        while self.queue:
            try:
                item = self.queue.popleft()
            except IndexError:  # another thread drains too
                return
            done = self._recycle_again(item) if isinstance(item, StagedSlots) else self.release(item)
            if not done:
                return

    def _recycle_again(self, item: StagedSlots) -> bool:
        try:
            return self.recycle(item.component, item.slots)
        except ValueError:  # some were given back once more meanwhile: the others still have to go
            if len(item.slots) > 1:
                self.queue.extend(
                    StagedSlots(item.component, item.slots[i : i + 1]) for i in range(len(item.slots))
                )
            return True
        except RadixError:
            self.queue.append(item)
            raise
