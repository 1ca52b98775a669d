"""Pull jobs under way: prefetches, which the transfer worker has no part in."""

from __future__ import annotations

import time

from flexkv_radix.lifecycle import Settle
from flexkv_radix.planner import Blocks
from flexkv_radix.settling import Settling
from flexkv_radix.table import Entry, TaskTable
from radixshmem import RadixError


class Jobs:
    """The running prefetches of one engine."""

    def __init__(self, table: TaskTable, settling: Settling) -> None:
        self._table = table
        self._settling = settling
        self._entries: list[Entry] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, entry: Entry) -> bool:
        """Await the job of a running task; True if it is over at once."""
        if self._finish(entry):
            return True
        with self._table.lock:
            self._entries.append(entry)
        return False

    def finish(self) -> bool:
        """Answer the tasks whose jobs are over, and forget those that ended otherwise; True if any was."""
        with self._table.lock:
            entries = list(self._entries)
        over = [entry for entry in entries if self._finish(entry)]
        if over:
            with self._table.lock:
                self._entries = [entry for entry in self._entries if entry not in over]
        return bool(over)

    def _finish(self, entry: Entry) -> bool:
        """True once a prefetch is over."""
        job, task = entry.hold.job, entry.task
        if job is None or task.state.is_terminal:
            return True
        error = ""
        try:
            if not job.done() and not task.is_cancelled:
                return False
            if not task.is_cancelled:
                task.set_moved(Blocks(0, job.wait(0.0).common_hit))
        except (RadixError, TimeoutError) as failure:
            error = str(failure)
        with self._table.lock:
            settle = task.transfer_done(error, time.monotonic())
            if settle is Settle.COMMIT:
                task.settled("", time.monotonic())
                settle = Settle.GIVE_BACK
            self._settling.settle(entry, settle)
        return True
