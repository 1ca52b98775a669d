"""How tasks end: what they hold is published or given back, and who waits is told.

Slots of a task whose transfer was lost stay aside for a moment before they go back (quarantine).
"""

from __future__ import annotations

import logging
import time
from collections import deque

from flexkv_radix.hold import Hold
from flexkv_radix.lifecycle import Settle
from flexkv_radix.metrics import Metrics
from flexkv_radix.table import Entry, TaskTable
from radixshmem import ClientClosed, RadixError, RegionRetired

logger = logging.getLogger(__name__)

# A device may write for a moment after its process was killed: the driver tears it down behind it.
_QUARANTINE_S = 2.0


class Settling:
    """Ends the tasks of one engine.  commit() and the quarantine are the engine thread's alone."""

    def __init__(self, table: TaskTable, metrics: Metrics) -> None:
        self._table = table
        self._metrics = metrics
        self._quarantine: deque[tuple[float, Hold]] = deque()

    def settle(self, entry: Entry, settle: Settle) -> None:
        """Give back what a task holds that ended without success; wants the table's lock."""
        if settle is Settle.GIVE_BACK:
            _give_back(entry.hold)
            self._ended(entry)

    def fail(self, entry: Entry, error: str) -> None:
        """End a task for which no transfer runs; wants the table's lock."""
        self.settle(entry, entry.task.fail(error, time.monotonic()))

    def commit(self, entry: Entry) -> None:
        """Publish what a task stored and answer it."""
        error = "internal error while publishing"
        try:
            error = entry.hold.commit()
        except RadixError as radix_error:
            error = str(radix_error)
        finally:  # whatever happened: who waits gets an answer
            with self._table.lock:
                entry.task.settled(error, time.monotonic())
                self._ended(entry)

    def lose_all(self, error: str) -> None:
        """End every task: nothing will come for it any more, and nobody works on it.

        Pins go now, slots after the quarantine.
        """
        now_s = time.monotonic()
        with self._table.lock:
            for entry in self._table.unfinished():
                if entry.task.fail(error, now_s) is Settle.GIVE_BACK:
                    hold, entry.hold = entry.hold, Hold()
                    self._quarantine.append((now_s + _QUARANTINE_S, Hold(staged=hold.staged)))
                    _give_back(Hold(hold.matches, job=hold.job))
                    self._ended(entry)

    def release_quarantine(self, now_s: float) -> float | None:
        """Give back what was aside for long enough; returns when the next is due, None if there is none."""
        while self._quarantine:
            due_s, hold = self._quarantine[0]
            if due_s > now_s:
                return due_s
            self._quarantine.popleft()
            _give_back(hold)
        return None

    def _ended(self, entry: Entry) -> None:
        key = entry.task.kind, entry.task.state
        self._metrics.tasks[key] = self._metrics.tasks.get(key, 0) + 1
        self._table.note_end(entry)


def _give_back(hold: Hold) -> None:
    try:
        hold.give_back()
    except (RegionRetired, ClientClosed):  # what was held there went with it
        hold.release_pins()
    except RadixError as error:
        logger.warning("pins or slots could not be given back: %s", error)
