"""What one attach holds, and the releases that could not be done at once.

A release can be due where nothing may block or lock: in the garbage collector, which may run in the
middle of any other Python code, or while the index is busy.  It is queued then, and the next verb
does it.  Nothing is lost: a queue lives as long as its attach, and detaching gives everything back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TypeVar

from radixshmem.arrays import I32Array
from radixshmem.errors import RadixError
from radixshmem.index import Index
from radixshmem.records import Pin

_Item = TypeVar("_Item")


class Lease:
    """Releases pins and staged slots of ``index``.

    Assumes: ``deque.append``, ``popleft`` and truth are atomic (they are, under the GIL and without it).
    """

    __slots__ = ("_pins", "_slots", "index")

    def __init__(self, index: Index) -> None:
        self.index = index
        self._pins: deque[Pin] = deque()
        self._slots: deque[tuple[int, I32Array]] = deque()

    def release(self, pin: Pin) -> None:
        """Drop ``pin`` now or, if the index is busy, with the next verb."""
        if not self.index.release(pin):
            self._pins.append(pin)

    def release_later(self, pin: Pin) -> None:
        """Drop ``pin`` with the next verb.  Safe anywhere, also inside the garbage collector."""
        self._pins.append(pin)

    def recycle(self, component: int, slots: I32Array) -> None:
        """Give staged slots back; what a busy index leaves goes with the next verb.

        ValueError, and nothing changed, when one of them is not this client's.
        """
        num_done = self.index.recycle(component, slots)
        if num_done < len(slots):
            self._slots.append((component, slots[num_done:].copy()))

    @property
    def num_queued(self) -> int:
        """Releases that wait for the next verb."""
        return len(self._pins) + len(self._slots)

    def drain(self) -> None:
        """Do what is queued, as far as the index is not busy."""
        if self._pins:
            self._drain_pins()
        if self._slots:
            self._drain_slots()

    def _drain_pins(self) -> None:
        for pin in _take_all(self._pins):
            self.release(pin)

    def _drain_slots(self) -> None:
        for component, slots in _take_all(self._slots):
            try:
                self.recycle(component, slots)
            except ValueError:  # some were given back once more meanwhile: the others still have to go
                for i in range(len(slots)):
                    with contextlib.suppress(ValueError):
                        self.recycle(component, slots[i : i + 1])
            except RadixError:
                self._slots.append((component, slots))
                raise


def _take_all(queue: deque[_Item]) -> list[_Item]:
    """Everything that is queued now; what is put back meanwhile stays for the next time."""
    taken = []
    for _ in range(len(queue)):
        try:
            taken.append(queue.popleft())
        except IndexError:  # another thread drains too
            break
    return taken
