"""Memory that the conductor shares with its workers: a seat for each, which outlives the worker in it."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# One word each.  The worker writes all but STOPS, which the conductor counts.
FIELDS = (
    "OPS", "VERIFIED_BYTES", "WORST_NS", "WORST_WALL_NS", "BUSY", "SLOT", "INCARNATION",
    "PUTS", "HIT_BLOCKS", "PIN_LIMITS", "SHORT", "STALE", "LOST_PREFIX",
    "RESETS", "STATUS_CALLS", "CHECKS", "STOPS",
)  # fmt: skip
_TEXT_BYTES = 4096
_SEAT_BYTES = 8192
NOBODY = (1 << 64) - 1


class Seat:
    """Counters of one seat; they go on where the last worker left them."""

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        start = index * _SEAT_BYTES
        self.index = index
        self._words = np.frombuffer(memory, np.uint64, len(FIELDS), start)
        self._thread = threading.local()
        self._memory, self._text = memory, start + _SEAT_BYTES - _TEXT_BYTES

    def __getitem__(self, field: str) -> int:
        return int(self._words[FIELDS.index(field)])

    def __setitem__(self, field: str, value: int) -> None:
        self._words[FIELDS.index(field)] = value

    def add(self, field: str, num: int = 1) -> None:
        self._words[FIELDS.index(field)] += np.uint64(num)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A verb, whose time counts unless this process was stopped meanwhile.

        Time in which it could run but got no CPU is the machine's, not the verb's; and while we wait for
        the index lock, its holder waits for a CPU about as long.
        """
        stops, start, delay = self["STOPS"], time.monotonic_ns(), self._run_delay_ns()
        yield
        taken = time.monotonic_ns() - start
        self.add("OPS")
        if self["STOPS"] == stops:
            self["WORST_WALL_NS"] = max(self["WORST_WALL_NS"], taken)
            self["WORST_NS"] = max(self["WORST_NS"], taken - 2 * (self._run_delay_ns() - delay))

    def watch_this_thread(self) -> None:
        """Called by each thread of a worker: whose time it is that counts."""
        self._thread.schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def _run_delay_ns(self) -> int:
        return int(os.pread(self._thread.schedstat, 100, 0).split()[1])

    @property
    def failure(self) -> str:
        """What went wrong in the worker, or ""."""
        text = self._memory[self._text : self._text + _TEXT_BYTES]
        return text.rstrip(b"\0").decode(errors="replace")

    def fail(self, text: str) -> None:
        data = text.encode()[-_TEXT_BYTES:]
        self._memory[self._text : self._text + len(data)] = data


def make_seats(num: int) -> list[Seat]:
    memory = mmap.mmap(-1, num * _SEAT_BYTES)
    return [Seat(memory, index) for index in range(num)]
