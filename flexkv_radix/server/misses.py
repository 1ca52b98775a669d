"""Tasks of a KVDPClient that were over at once because there was no server to ask.  Their ids are negative.

Each is kept as the request that it was, without its blocks: that is what its answer is made of, and what
makes it a task of a server when it becomes part of a batch there.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from flexkv_radix.launching import Launch
from flexkv_radix.lifecycle import Member
from flexkv_radix.planner import NO_BLOCKS
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.server import messages as m
from flexkv_radix.table import Answer

_MAX_MISSES = 16384  # as many as a task engine keeps
Request: TypeAlias = m.Match | m.Prefetch


class Misses:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, tuple[Request, ...]] = OrderedDict()  # a batch has several
        self._ids = itertools.count(-1, -1)
        self._lock = threading.Lock()

    def add(self, request: Request) -> int:
        """The task of a request that found nothing."""
        if isinstance(request, m.Match):
            request = msgspec.structs.replace(request, wanted=m.pack_blocks(NO_BLOCKS))
        return self._add((msgspec.structs.replace(request, hashes=b""),))

    def _add(self, requests: tuple[Request, ...]) -> int:
        with self._lock:
            task_id = next(self._ids)
            self._requests[task_id] = requests
            while len(self._requests) > _MAX_MISSES:
                self._requests.popitem(last=False)
            return task_id

    def check(self, launches: Sequence[Launch]) -> None:
        """ValueError for what a task engine would refuse: an unknown task, or blocks where none are moved."""
        with self._lock:
            for launch in launches:
                if not is_miss(launch.task_id):
                    continue
                if launch.task_id not in self._requests:
                    raise ValueError(f"task_ids: task {launch.task_id} is not known, or was answered before")
                if len(launch.gpu_blocks):
                    raise ValueError(
                        f"slot_mappings: {len(launch.gpu_blocks)} blocks given for task {launch.task_id}, "
                        "0 are to be moved"
                    )

    def requests(self, task_id: int) -> tuple[Request, ...]:
        """What the task was asked for; nothing if it is not known."""
        with self._lock:
            return self._requests.get(task_id, ())

    def merge(self, task_ids: Sequence[int]) -> int:
        """One task of all, which are forgotten.  ValueError, and nothing changed, if kinds differ."""
        requests = [request for task_id in task_ids for request in self.requests(task_id)]
        if len({(type(one), isinstance(one, m.Match) and one.is_put) for one in requests}) > 1:
            raise ValueError("as_batch: GETs and PUTs cannot become one task; launch them apart")
        self.forget(task_ids)
        return self._add(tuple(requests))

    def forget(self, task_ids: Sequence[int]) -> None:
        with self._lock:
            for task_id in task_ids:
                self._requests.pop(task_id, None)

    def take(self, task_ids: Sequence[int]) -> tuple[dict[int, Answer], list[int]]:
        """(answers of the misses among task_ids, which are forgotten; the other ids)."""
        answers = {}
        with self._lock:
            for task_id in filter(is_miss, dict.fromkeys(task_ids)):
                requests = self._requests.pop(task_id, ())
                members = tuple(Member(request.num_tokens, NO_BLOCKS) for request in requests)
                status = KVResponseStatus.SUCCESS if requests else KVResponseStatus.NOT_FOUND
                answers[task_id] = Answer(status, members)
        return answers, [task_id for task_id in task_ids if not is_miss(task_id)]


def is_miss(task_id: int) -> bool:
    return task_id <= 0
