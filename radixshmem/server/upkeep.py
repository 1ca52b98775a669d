"""What a server does every second: reap, evict ahead, watch the region's health."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

import numpy as np

from radixshmem.errors import IndexBusy, RadixError
from radixshmem.geometry import COMPONENT_MASK_FULL, ComponentType
from radixshmem.index import QUERY_NO_META, QUERY_PROBE, Index, Match
from radixshmem.records import EventReason, QueryStatus

log = logging.getLogger(__name__)

PERIOD_S = 1.0
EVICT_STEP = 4096  # blocks per call: short enough that stopping is never kept waiting
STALL_S = 30.0  # a thread that has not come round for so long is stuck
_PROBE_HASH = np.zeros(1, np.uint64)


class Upkeep:
    """A thread that looks after ``read_index()`` once a second while there is one.

    ``verify``: raises when the regions' files are not whole any more.  ``on_failure`` is called with the
    error that makes the regions unusable.
    """

    def __init__(
        self,
        read_index: Callable[[], Index | None],
        free_ratio: float,
        verify: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._read_index = read_index
        self._free_ratio = free_ratio
        self._verify = verify
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._last_round = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def is_alive(self) -> bool:
        """Whether the thread still comes round."""
        return self._thread.is_alive() and time.monotonic() - self._last_round < STALL_S

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._last_round = time.monotonic()
            index = self._read_index()
            if index is None:
                continue
            try:
                self._go_round(index)
            except (IndexBusy, OSError) as error:  # OSError: no descriptor left, say; the regions are well
                log.warning("upkeep put off for a second: %s", error)
            except RadixError as error:
                if not self._stopping.is_set() and not index.closed:
                    self._on_failure(error)

    def _go_round(self, index: Index) -> None:
        self._verify()
        reaped = index.reap()
        if reaped.clients:
            log.info(
                "reaped %d dead clients: %d pins, %d staged slots", reaped.clients, reaped.pins, reaped.slots
            )
        if self._free_ratio:
            self._evict_ahead(index)

    def _evict_ahead(self, index: Index) -> None:
        pools = index.stats()["pool"]
        for component in ComponentType:
            pool = pools[component]
            missing = math.ceil(pool["capacity"] * self._free_ratio) - pool["num_free"]
            while missing > 0 and not self._stopping.is_set():
                num = index.evict(component, min(missing, EVICT_STEP), EventReason.BACKGROUND)
                if not num:
                    break
                missing -= num


def look_up(index: Index) -> None:
    """A real lookup, as readiness probe and watchdog want it.  Raises RadixError when it fails."""
    result = Match()
    index.match(_PROBE_HASH, COMPONENT_MASK_FULL, QUERY_NO_META | QUERY_PROBE, result)
    if result.status != QueryStatus.OK:
        raise IndexBusy("a lookup was not answered")
