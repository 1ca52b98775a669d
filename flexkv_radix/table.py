"""The tasks that are known, and waiting for them.

Guarantees: a terminal task is answered once and then forgotten; one that nobody asks for is forgotten
after ttl_s, or when _MAX_ENDED younger ones have ended, so that the table stays bounded (some engines
never ask about a miss); waiting ends at its deadline whatever happens.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from flexkv_radix.hold import Hold
from flexkv_radix.lifecycle import Member, Task, TaskState
from flexkv_radix.planner import NO_BLOCKS
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.tier import CacheEngineRadixShmem

_MAX_ENDED = 16384  # far more than an engine has requests

_STATUS = {
    TaskState.COMPLETED: KVResponseStatus.SUCCESS,
    TaskState.FAILED: KVResponseStatus.FAILED,
    TaskState.CANCELLED: KVResponseStatus.CANCELLED,
    TaskState.UNREADY: KVResponseStatus.UNREADY,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a task stands.  members: what it moved, one entry per request; no blocks unless it succeeded."""

    status: KVResponseStatus
    members: tuple[Member, ...] = ()
    error: str = ""


class Entry:
    """A task, what it holds, and of which tier that is (None: it holds nothing)."""

    __slots__ = ("hold", "task", "tier")

    def __init__(self, task: Task, hold: Hold, tier: CacheEngineRadixShmem | None) -> None:
        self.task = task
        self.hold = hold
        self.tier = tier


class TaskTable:
    """Entries by task id.  Everything but new_id, answers and wait wants `lock` held."""

    def __init__(self, ttl_s: float) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._ids = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._ended: deque[tuple[float, int]] = deque()  # terminal tasks, oldest first
        self._unlaunched: deque[tuple[float, int]] = deque()  # as they were added
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        return len(self._entries)

    def new_id(self) -> int:
        return next(self._ids)

    def add(self, entry: Entry) -> None:
        task = entry.task
        self._entries[task.task_id] = entry
        if task.state is TaskState.UNREADY:
            self._unlaunched.append((task.created_s, task.task_id))
        elif task.state.is_terminal:
            self.note_end(entry)

    def get(self, task_id: int) -> Entry | None:
        return self._entries.get(task_id)

    def forget(self, task_id: int) -> None:
        del self._entries[task_id]

    def unfinished(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if not entry.task.state.is_terminal]

    def note_end(self, entry: Entry) -> None:
        """entry's task has become terminal: wake who waits for it."""
        self._ended.append((entry.task.finished_s, entry.task.task_id))
        if len(self._ended) > _MAX_ENDED:
            self._entries.pop(self._ended.popleft()[1], None)
        self._changed.notify_all()

    def expire(self, now_s: float) -> list[Entry]:
        """Forget terminal tasks older than the time to live; returns unlaunched ones that are."""
        horizon_s = now_s - self._ttl_s
        while self._ended and self._ended[0][0] < horizon_s:
            self._entries.pop(self._ended.popleft()[1], None)
        expired = []
        while self._unlaunched and self._unlaunched[0][0] < horizon_s:
            entry = self._entries.get(self._unlaunched.popleft()[1])
            if entry is not None and entry.task.state is TaskState.UNREADY:
                expired.append(entry)
        return expired

    def answers(self, task_ids: Iterable[int]) -> tuple[dict[int, Answer], list[int]]:
        """(answers of tasks that do not run, ids of those that do)."""
        with self.lock:
            return self._answers(task_ids)

    def wait(self, task_ids: Iterable[int], timeout_s: float) -> dict[int, Answer]:
        """Answers for all task_ids; TIMEOUT for those that still run after timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            answers, running = self._answers(task_ids)
            while running and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                more, running = self._answers(running)
                answers |= more
        return answers | dict.fromkeys(running, Answer(KVResponseStatus.TIMEOUT))

    def _answers(self, task_ids: Iterable[int]) -> tuple[dict[int, Answer], list[int]]:
        answers: dict[int, Answer] = {}
        running: list[int] = []
        for task_id in dict.fromkeys(task_ids):
            entry = self._entries.get(task_id)
            if entry is None:
                answers[task_id] = Answer(KVResponseStatus.NOT_FOUND)
            elif entry.task.state in _STATUS:
                answers[task_id] = self._answer(entry.task)
            else:
                running.append(task_id)
        return answers, running

    def _answer(self, task: Task) -> Answer:
        members = task.members
        if task.state.is_terminal:
            del self._entries[task.task_id]
        if task.state is not TaskState.COMPLETED:
            members = tuple(Member(member.num_tokens, NO_BLOCKS) for member in members)
        return Answer(_STATUS[task.state], members, task.error)
