"""Pull jobs: bring a peer's blocks into the local store.  On one node a job is done at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from radixshmem.query import QueryResult

NO_RANK = -1
"""``PullResult.source_rank`` when no peer was asked."""

_job_ids = itertools.count(1)
_POLL_S = 0.001


class PullResult(NamedTuple):
    """What a pull brought.

    ``common_hit``: blocks that are local now.  ``finalize`` drops their pin (None without ``lock``).
    """

    common_hit: int
    remote_blocks: int
    remote_bytes: int
    source_rank: int
    finalize: Callable[[], None] | None


class PullJob:
    """A pull under way.  It counts as outstanding until ``wait`` or ``cancel``, or until it is collected.

    ``local_hit``: blocks that were local when it began; ``planned_hit``: blocks it set out to serve.
    """

    __slots__ = ("_open_jobs", "_result", "job_id", "local_hit", "planned_hit")

    def __init__(self, local: QueryResult, open_jobs: set[int]) -> None:
        """``open_jobs`` holds the ids of the client's outstanding jobs."""
        self.job_id = next(_job_ids)
        self.local_hit = local.common_hit
        self.planned_hit = local.common_hit
        self._result = PullResult(local.common_hit, 0, 0, NO_RANK, local.finalize)
        self._open_jobs = open_jobs
        open_jobs.add(self.job_id)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return True

    def wait(self, timeout: float | None = None) -> PullResult:
        """The result, within ``timeout`` seconds (TimeoutError); again if called again."""
        self._open_jobs.discard(self.job_id)
        return self._result

    def cancel(self) -> None:
        """Give up: what was pulled stays, the pin is dropped."""
        self._open_jobs.discard(self.job_id)
        if self._result.finalize is not None:
            self._result.finalize()

    def __del__(self) -> None:
        # set.discard is atomic: safe inside the garbage collector.
        if hasattr(self, "_open_jobs"):
            self._open_jobs.discard(self.job_id)


def await_room(open_jobs: set[int], max_outstanding: int, timeout_s: float, block: bool) -> None:
    """Return once fewer than ``max_outstanding`` jobs are outstanding.

    TimeoutError after ``timeout_s``, or at once when not ``block``.
    """
    deadline = time.monotonic() + (timeout_s if block else 0.0)
    while len(open_jobs) >= max_outstanding:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{len(open_jobs)} pull jobs are outstanding (max_outstanding): collect some")
        time.sleep(_POLL_S)
