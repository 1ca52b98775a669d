"""The life of a task.  Pure: events in, what to do with its resources out.

              launch          submitted         last transfer done
    UNREADY ---------> READY -----------> RUNNING ---------------> (commit) ---> COMPLETED
       | cancel, expire  | submit failed     | a transfer failed, or cancel:          or FAILED
       v                 v                   v once the last one is over              if publishing failed
    CANCELLED          FAILED             FAILED / CANCELLED (give back)

A transfer cannot be called back: a cancelled task keeps its pin and its slots until the last transfer
is over, and only then answers.  A lost transfer worker ends every task at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from flexkv_radix.planner import Blocks, Transfer


class TaskKind(IntEnum):
    GET = 0
    PUT = 1
    PREFETCH = 2


class TaskState(IntEnum):
    UNREADY = 0  # matched, waits for the engine's blocks
    READY = 1  # bound to the engine's blocks
    RUNNING = 2
    COMPLETED = 3  # this one and those behind it are terminal
    FAILED = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        return self >= TaskState.COMPLETED


class Settle(Enum):
    """What the caller must do with the task's resources now."""

    NOTHING = auto()
    COMMIT = auto()  # publish staged slots, drop pins; then report to settled()
    GIVE_BACK = auto()  # recycle staged slots, drop pins


@dataclass(slots=True)
class Member:
    """One request of a task (a batch has several): which blocks of how many tokens it moves."""

    num_tokens: int
    blocks: Blocks


@dataclass(slots=True)
class Task:
    """State of one task.  Methods are events; call them under the engine's lock."""

    task_id: int
    kind: TaskKind
    members: tuple[Member, ...]
    transfers: tuple[Transfer, ...]
    created_s: float
    state: TaskState = TaskState.UNREADY
    error: str = ""
    finished_s: float = 0.0
    _num_running: int = 0
    _is_cancelled: bool = False
    _is_committing: bool = False

    def launched(self, num_transfers: int) -> None:
        """The engine's blocks are bound; num_transfers >= 1 transfers will report."""
        self._require(TaskState.UNREADY)
        self.state = TaskState.READY
        self._num_running = num_transfers

    def submitted(self) -> None:
        """The transfers were handed over (results may have come before this)."""
        if self.state is TaskState.READY:
            self.state = TaskState.RUNNING

    def set_moved(self, blocks: Blocks) -> None:
        """What a prefetch turned out to bring."""
        self.members = tuple(Member(member.num_tokens, blocks) for member in self.members)

    def transfer_done(self, error: str, now_s: float) -> Settle:
        """One transfer is over; error is "" if it went well."""
        if self.state.is_terminal:  # the worker was declared lost before this came in
            return Settle.NOTHING
        self.error = self.error or error
        self._num_running -= 1
        if self._num_running > 0:
            return Settle.NOTHING
        if self.error:
            return self._end(TaskState.FAILED, now_s)
        if self._is_cancelled:
            return self._end(TaskState.CANCELLED, now_s)
        self._is_committing = True
        return Settle.COMMIT

    def settled(self, error: str, now_s: float) -> None:
        """The commit is over; error is "" if everything was published."""
        self.error = error
        self._is_committing = False
        self._end(TaskState.FAILED if error else TaskState.COMPLETED, now_s)

    def cancel(self, now_s: float) -> Settle:
        """Wanted no more.  While transfers run, only noted."""
        if self.state is TaskState.UNREADY:
            return self._end(TaskState.CANCELLED, now_s)
        self._is_cancelled = True
        return Settle.NOTHING

    def fail(self, error: str, now_s: float) -> Settle:
        """No more results will come for this task."""
        if self.state.is_terminal or self._is_committing:
            return Settle.NOTHING
        self.error = error
        return self._end(TaskState.FAILED, now_s)

    def finish(self, error: str, now_s: float) -> Settle:
        """Nothing has to be moved: over before it began; error is "" for success."""
        self._require(TaskState.UNREADY)
        self.error = error
        return self._end(TaskState.FAILED if error else TaskState.COMPLETED, now_s)

    @property
    def is_cancelled(self) -> bool:
        """Whether a cancel was noted while transfers run."""
        return self._is_cancelled

    def _end(self, state: TaskState, now_s: float) -> Settle:
        self.state = state
        self.finished_s = now_s
        return Settle.GIVE_BACK

    def _require(self, state: TaskState) -> None:
        if self.state is not state:
            raise ValueError(f"task {self.task_id} is {self.state.name}, not {state.name}")
