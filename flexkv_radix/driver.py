"""The engine's own thread: attaches, starts the worker, and then turns results into answers.

    attach --refused or timed out--> disabled (matches are misses, tasks end at once)
    serving --worker died----------> disabled, running tasks FAILED

An error of the cache never reaches the engine's request path as an exception.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexkv_radix.attach import AttachCancelled
from flexkv_radix.hold import Hold
from flexkv_radix.lifecycle import Settle, TaskState
from flexkv_radix.link import StoreLink
from flexkv_radix.metrics import Metrics
from flexkv_radix.planner import BlockIds, Blocks, Transfer
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Entry, TaskTable
from flexkv_radix.tier import CacheEngineRadixShmem
from flexkv_radix.transfer.protocol import OpResult, TransferDied, TransferOp
from radixshmem import RadixError

logger = logging.getLogger(__name__)

_POLL_S = 0.2  # how late a stop or an expiry may be noticed
_JOB_POLL_S = 0.005  # the same while pull jobs run, which give no sign
_SWEEP_S = 1.0
# A device may write for a moment after its process was killed: the driver tears it down behind it.
_QUARANTINE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Submitted:
    entry: Entry
    op: TransferOp
    launched_ns: int


class Driver:
    """Runs the transfers and jobs of one engine's tasks."""

    def __init__(
        self, spec: EngineSpec, table: TaskTable, metrics: Metrics, on_change: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._table = table
        self._metrics = metrics
        self._on_change = on_change
        self._stop = threading.Event()
        self._link = StoreLink(spec, self._stop)
        self._op_ids = itertools.count(1)
        self._submitted: dict[int, _Submitted] = {}
        self._jobs: list[Entry] = []
        self._quarantine: deque[tuple[float, Hold]] = deque()
        self._next_sweep_s = 0.0
        self._is_closed = False  # nobody awaits results any more
        self._thread = threading.Thread(target=self._run, name=f"flexkv-{spec.dp_client_id}", daemon=True)
        self.tier: CacheEngineRadixShmem | None = None  # while matches are served
        self.failure: Exception | None = None  # of start-up; for is_ready() to raise
        self.disabled = ""  # why the cache is off

    # -- called by the engine's threads

    def start(self) -> None:
        """Begin to attach; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the worker, end all tasks, leave the radix-server.  A second call does nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def register(
        self, entry: Entry, bound: Iterable[tuple[Transfer, BlockIds]], *, layerwise: bool, counter_id: int
    ) -> list[TransferOp]:
        """Make ops of an unlaunched task's transfers and await their results.  Wants the table's lock."""
        ops = [
            TransferOp(next(self._op_ids), t.kind, t.component, blocks, t.slots, layerwise, counter_id)
            for t, blocks in bound
        ]
        if ops:
            entry.task.launched(len(ops))
        elif entry.task.state is TaskState.UNREADY:  # nothing to move after all
            self._settle(entry, entry.task.finish("", time.monotonic()))
        now_ns = time.monotonic_ns()
        for op in ops:
            self._submitted[op.op_id] = _Submitted(entry, op, now_ns)
        return ops

    def submit(self, ops: list[TransferOp], entries: Iterable[Entry]) -> None:
        """Hand the registered ops of entries to the worker; a dead worker ends their tasks as FAILED."""
        try:
            self._link.submit(ops)
        except (TransferDied, RuntimeError) as error:
            with self._table.lock:
                for op in ops:
                    self._submitted.pop(op.op_id, None)
                for entry in entries:
                    self._settle(entry, entry.task.fail(str(error), time.monotonic()))
            return
        with self._table.lock:
            for entry in entries:
                entry.task.submitted()

    def add_job(self, entry: Entry) -> None:
        """Await the pull job of a running task."""
        if self._finish_job(entry):
            return
        with self._table.lock:
            if self._is_closed:
                self._settle(entry, entry.task.fail(self.disabled or "shut down", time.monotonic()))
            else:
                self._jobs.append(entry)

    def cancel(self, entry: Entry) -> None:
        """Cancel a task; wants the table's lock."""
        if not entry.task.state.is_terminal:
            self._settle(entry, entry.task.cancel(time.monotonic()))

    # -- the thread

    def _run(self) -> None:
        try:
            if self._open():
                while not self._stop.is_set():
                    self._step()
        except TransferDied as error:
            if not self._stop.is_set():
                self._disable(f"the transfer worker died: {error}")
        except Exception as error:
            self._disable(f"internal error: {error!r}")
            raise
        finally:
            self._close()

    def _open(self) -> bool:
        """Attach and start the worker; False when there is nothing to serve."""
        if self._spec.switched_off:
            self._disable(self._spec.switched_off)
            return False
        try:
            tier = self._link.attach()
        except AttachCancelled:
            return False
        except (RadixError, ValueError, TimeoutError, OSError) as error:
            self._refused(error)
            return False
        try:
            self._link.start_worker()
        except RuntimeError as error:
            self.failure = error
            self._disable(f"the transfer worker could not start: {error}")
            return False
        self.tier = tier
        self._on_change()
        return True

    def _refused(self, error: Exception) -> None:
        if self._spec.strict:
            self.failure = error
        self._disable(f"radix-server {self._spec.radix_server_name}: {error}")

    def _disable(self, why: str) -> None:
        self.tier = None
        self.disabled = why
        self._metrics.is_disabled = 1
        logger.warning("running without the KV cache: %s", why)
        self._on_change()

    def _step(self) -> None:
        results = self._link.poll(_JOB_POLL_S if self._jobs else _POLL_S)
        for result in results:
            self._take(result)
        self._finish_jobs()
        if (now_s := time.monotonic()) >= self._next_sweep_s:
            self._next_sweep_s = now_s + _SWEEP_S
            self._sweep(now_s)
        if results:
            self._on_change()

    def _take(self, result: OpResult) -> None:
        with self._table.lock:
            submitted = self._submitted.pop(result.op_id, None)
            if submitted is None:
                return
            entry, op = submitted.entry, submitted.op
            error = "" if result.ok else result.error or "the transfer failed"
            settle = entry.task.transfer_done(error, time.monotonic())
            if settle is not Settle.COMMIT:
                self._settle(entry, settle)
        if settle is Settle.COMMIT:
            self._commit(entry)
        times_ns = (submitted.launched_ns, result.started_ns, result.finished_ns, time.monotonic_ns())
        if result.ok:
            self._metrics.transferred(op.kind, op.component, len(op.slots), result.num_bytes, times_ns)

    def _commit(self, entry: Entry) -> None:
        error = "internal error while publishing"
        try:
            error = entry.hold.commit()
        except RadixError as radix_error:
            error = str(radix_error)
        finally:  # whatever happened: who waits gets an answer
            with self._table.lock:
                entry.task.settled(error, time.monotonic())
                self._ended(entry)

    def _settle(self, entry: Entry, settle: Settle) -> None:
        """Give back what a task holds that ended without success; wants the table's lock."""
        if settle is Settle.GIVE_BACK:
            _give_back(entry.hold)
            self._ended(entry)

    def _ended(self, entry: Entry) -> None:
        key = entry.task.kind, entry.task.state
        self._metrics.tasks[key] = self._metrics.tasks.get(key, 0) + 1
        self._table.note_end(entry)

    def _finish_jobs(self) -> None:
        with self._table.lock:
            jobs = list(self._jobs)
        over = [entry for entry in jobs if self._finish_job(entry)]
        if over:
            with self._table.lock:
                self._jobs = [entry for entry in self._jobs if entry not in over]

    def _finish_job(self, entry: Entry) -> bool:
        """True once a prefetch is over."""
        job, task = entry.hold.job, entry.task
        if job is None or task.state.is_terminal:
            return True
        if not job.done() and not task.is_cancelled:
            return False
        error = ""
        if not task.is_cancelled:
            try:
                task.set_moved(Blocks(0, job.wait(0.0).common_hit))
            except (RadixError, TimeoutError) as failure:
                error = str(failure)
        with self._table.lock:
            settle = task.transfer_done(error, time.monotonic())
            if settle is Settle.COMMIT:
                task.settled("", time.monotonic())
                settle = Settle.GIVE_BACK
            self._settle(entry, settle)
        self._on_change()
        return True

    def _sweep(self, now_s: float) -> None:
        with self._table.lock:
            for entry in self._table.expire(now_s):
                logger.warning("task %d was matched but never launched: cancelled", entry.task.task_id)
                self.cancel(entry)
        self._release_quarantine(now_s)

    # -- the end

    def _close(self) -> None:
        self._link.stop_worker()
        deadline_s = time.monotonic() + _QUARANTINE_S
        with self._table.lock:
            self.tier = None
            self._is_closed = True
            self._submitted.clear()
            for entry in self._table.unfinished():
                self._lose(entry, deadline_s)
        self._on_change()
        while not self._stop.is_set() and self._quarantine:
            self._stop.wait(max(0.0, self._quarantine[0][0] - time.monotonic()))
            self._release_quarantine(time.monotonic())
        self._link.close()  # takes back whatever is still staged, with the quarantine of the region

    def _lose(self, entry: Entry, deadline_s: float) -> None:
        """End a task for which nothing will come any more; its slots stay aside for a moment."""
        task = entry.task
        settle = task.fail(self.disabled or "shut down", time.monotonic())
        if settle is not Settle.GIVE_BACK:
            return
        entry.hold.release_pins()
        self._quarantine.append((deadline_s, Hold(staged=entry.hold.staged)))
        entry.hold = Hold()
        self._ended(entry)

    def _release_quarantine(self, now_s: float) -> None:
        while self._quarantine and self._quarantine[0][0] <= now_s:
            _give_back(self._quarantine.popleft()[1])


def _give_back(hold: Hold) -> None:
    try:
        hold.give_back()
    except RadixError as error:  # a retired region takes nothing back, and needs nothing
        logger.warning("pins or slots could not be given back: %s", error)
