"""The engine's own thread: attaches, starts the worker, turns results into answers, and recovers.

    attaching --attached--> starting --all ranks registered--> serving
        |                    |    ^                              |  |
        | refused,           |    +---- the worker died ---------+  |
        | timed out          | (the first start) failed             |
        v                    v                                      |
    disabled <---------------+      attaching <-- region retired ---+

In every state but `serving` the cache is off: matches are misses and tasks end at once.  What was under
way when the worker or the region was lost is FAILED.  `disabled` is for good: the cause is one that waiting
does not cure, or a worker that dies again and again (restarts.py).

An error of the cache never reaches the engine's request path as an exception.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexkv_radix.attach import AttachCancelled
from flexkv_radix.jobs import Jobs
from flexkv_radix.lifecycle import Settle, TaskState
from flexkv_radix.link import StoreLink
from flexkv_radix.metrics import Metrics
from flexkv_radix.planner import BlockIds, Transfer
from flexkv_radix.restarts import Restarts
from flexkv_radix.settling import Settling
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Entry, TaskTable
from flexkv_radix.tier import CacheEngineRadixShmem
from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import OpResult, TransferDied, TransferOp
from flexkv_radix.transfer.signals import accept_unused
from radixshmem import RadixError, RegionRetired

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0  # more than a worker is given, and the radix-server to answer
_POLL_S = 0.2  # how late a stop or an expiry may be noticed
_JOB_POLL_S = 0.005  # the same while pull jobs run, which give no sign
_READY_POLL_S = 0.02
_SWEEP_S = 0.5  # how late the end of a region may be noticed where no request meets it
_REATTACH_S = 1.0  # between tries while a server that ends, or begins, says neither yes nor no

# What an engine that was served meets while one server closes and the next has not got its memory yet;
# the files may vanish at any moment of it.
_MAY_PASS = (RadixError, FileNotFoundError, TimeoutError)


@dataclass(frozen=True, slots=True)
class _Submitted:
    entry: Entry
    op: TransferOp
    launched_ns: int


class _Refused(Exception):  # noqa: N818 - what the server did, not an error of ours
    """Waiting for the radix-server is of no use."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Driver:
    """Runs the transfers and jobs of one engine's tasks."""

    def __init__(
        self,
        spec: EngineSpec,
        table: TaskTable,
        metrics: Metrics,
        on_change: Callable[[], None],
        lifeline_fd: int | None = None,
    ) -> None:
        """lifeline_fd: how somebody else knows of the end of transfer workers (TransferHandle)."""
        self._spec = spec
        self._table = table
        self._metrics = metrics
        self._on_change = on_change
        self._stop = threading.Event()
        self._link = StoreLink(spec, self._stop, lifeline_fd)
        self._restarts = Restarts()
        self._settling = Settling(table, metrics)
        self._jobs = Jobs(table, self._settling)
        self._op_ids = itertools.count(1)
        self._submitted: dict[int, _Submitted] = {}
        self._next_sweep_s = 0.0
        self._has_served = False
        self._thread = threading.Thread(target=self._run, name=f"flexkv-{spec.dp_client_id}", daemon=True)
        self.tier: CacheEngineRadixShmem | None = None  # while matches are served
        self.failure: Exception | None = None  # of start-up; for is_ready() to raise
        self.disabled = ""  # why the cache is off, for good or until it is back

    # -- called by the engine's threads

    def start(self) -> None:
        """Begin to attach; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the worker, end all tasks, leave the radix-server.  A second call does nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning(
                    "the cache is still ending: its worker cannot be stopped, or a server does not answer"
                )

    @property
    def worker(self) -> TransferHandle | None:
        """Whom ops registered now have to be submitted to."""
        return self._link.worker

    def drop_if_stale(self, entry: Entry) -> None:
        """End an unlaunched task whose match is worth nothing any more; wants the table's lock."""
        if entry.task.state is TaskState.UNREADY and entry.tier is not self.tier:
            self.fail(entry, self.disabled or "the radix-server made its regions anew")

    def fail(self, entry: Entry, error: str) -> None:
        """End a task for which no transfer runs; wants the table's lock."""
        self._settling.fail(entry, error)

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
            self._settling.settle(entry, entry.task.finish("", time.monotonic()))
        now_ns = time.monotonic_ns()
        for op in ops:
            self._submitted[op.op_id] = _Submitted(entry, op, now_ns)
        return ops

    def submit(self, worker: TransferHandle | None, ops: list[TransferOp], entries: Iterable[Entry]) -> str:
        """Hand registered ops of entries to `worker` as it was then; if that died, the tasks are FAILED.

        Returns why, or "" when the ops were handed over.

        Never to another one: whoever lost that worker has ended the tasks and may have given their slots
        away.
        """
        try:
            if worker is None:
                raise TransferDied("the transfer worker is not running")
            worker.submit(ops)
        except (TransferDied, RuntimeError) as error:
            with self._table.lock:
                for op in ops:
                    self._submitted.pop(op.op_id, None)
                for entry in entries:
                    self.fail(entry, str(error))
            return str(error)
        with self._table.lock:
            for entry in entries:
                entry.task.submitted()
        return ""

    def add_job(self, entry: Entry) -> None:
        """Await the pull job of a running task."""
        with self._table.lock:
            if entry.tier is not self.tier:
                self.fail(entry, self.disabled or "shut down")
        if self._jobs.add(entry):
            self._on_change()

    def cancel(self, entry: Entry) -> None:
        """Cancel a task; wants the table's lock."""
        if not entry.task.state.is_terminal:
            self._settling.settle(entry, entry.task.cancel(time.monotonic()))

    # -- the thread

    def _run(self) -> None:
        try:
            if self._spec.switched_off:
                self._disable(self._spec.switched_off)
            else:
                while self._session():
                    pass
            if self.disabled and not self._has_served:
                accept_unused(self._spec.layerwise_sockets, self._stop)
        except Exception as error:
            self._disable(f"internal error: {error!r}")
            raise
        finally:
            self._close()

    def _session(self) -> bool:
        """Serve until the engine stops or something is lost; False when the cache stays off."""
        try:
            if self._link.tier is None:
                self._attach()
            self._start_worker()
            self._opened()
            while not self._stop.is_set():
                self._step()
        except AttachCancelled:
            return False
        except _Refused as refusal:
            return self._refused(refusal.cause)
        except RegionRetired as error:
            return self._region_lost(error)
        except TransferDied as error:
            return self._worker_lost(error)
        return False

    def _attach(self) -> None:
        """Wait for the radix-server: the first time as long as the settings say, later for ever."""
        while True:
            try:
                return self._link.attach(math.inf if self._has_served else self._spec.attach_timeout_s)
            except AttachCancelled:
                raise
            except (ValueError, OSError, RadixError) as error:
                if not self._has_served or not isinstance(error, _MAY_PASS):
                    raise _Refused(error) from error
                logger.debug("radix-server %s: %s", self._spec.radix_server_name, error)
            if self._stop.wait(_REATTACH_S):
                raise AttachCancelled("shut down while waiting for the radix-server")

    def _start_worker(self) -> None:
        """Start the worker and wait until all ranks have registered."""
        self._link.start_worker()
        while not self._link.is_worker_ready():
            self._sweep()
            if self._stop.wait(_READY_POLL_S):
                raise AttachCancelled("shut down while waiting for the ranks")

    def _opened(self) -> None:
        if self._has_served:
            logger.warning("the KV cache is back")
        self._has_served = True
        self.tier = self._link.tier  # in this order, so that is_ready() stays True
        self.disabled, self._metrics.is_disabled = "", 0
        self._on_change()

    def _step(self) -> None:
        results = self._link.poll(_JOB_POLL_S if self._jobs else _POLL_S)
        for result in results:
            self._take(result)
        if self._jobs.finish() or results:
            self._on_change()
        self._sweep()

    def _take(self, result: OpResult) -> None:
        with self._table.lock:
            submitted = self._submitted.pop(result.op_id, None)
            if submitted is None:
                return
            entry, op = submitted.entry, submitted.op
            error = "" if result.ok else result.error or "the transfer failed"
            settle = entry.task.transfer_done(error, time.monotonic())
            if settle is not Settle.COMMIT:
                self._settling.settle(entry, settle)
        if settle is Settle.COMMIT:
            self._settling.commit(entry)
        times_ns = (submitted.launched_ns, result.started_ns, result.finished_ns, time.monotonic_ns())
        if result.ok:
            self._metrics.transferred(op.kind, op.component, len(op.slots), result.num_bytes, times_ns)

    def _sweep(self) -> None:
        """What is looked at now and then.  RegionRetired if the region is served no more."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _SWEEP_S
        with self._table.lock:
            for entry in self._table.expire(now_s):
                logger.warning("task %d was matched but never launched: cancelled", entry.task.task_id)
                self.cancel(entry)
        self._settling.release_quarantine(now_s)
        self._link.check_region()

    # -- losses

    def _worker_lost(self, error: TransferDied) -> bool:
        if self._stop.is_set():
            return False
        if not self._has_served:
            self.failure = error
            self._disable(f"the transfer worker could not start: {error}")
            return False
        pause_s = self._restarts.died(time.monotonic())
        if pause_s is None:
            self._disable(f"the transfer worker died: {error} ({self._restarts}, it is not started again)")
            return False
        self._suspend(f"the transfer worker died: {error}; it is started again")
        self._link.stop_worker()
        self._end_all()
        end_s = time.monotonic() + pause_s
        while (left_s := end_s - time.monotonic()) > 0 and not self._stop.wait(min(left_s, _POLL_S)):
            self._settling.release_quarantine(time.monotonic())
        return not self._stop.is_set()

    def _region_lost(self, error: RegionRetired) -> bool:
        self._suspend(f"radix-server {self._spec.radix_server_name}: {error}; waiting for another")
        self._link.stop_worker()
        self._end_all()
        self._link.leave()
        return True

    def _end_all(self) -> None:
        """End all tasks.  Nobody may be working on them any more."""
        with self._table.lock:
            self._submitted.clear()
        self._settling.lose_all(self.disabled or "shut down")
        self._jobs.finish()
        self._on_change()

    def _refused(self, error: Exception) -> bool:
        if self._spec.strict and not self._has_served:
            self.failure = error
        self._disable(f"radix-server {self._spec.radix_server_name}: {error}")
        return False

    def _suspend(self, why: str) -> None:
        self.disabled = why
        self.tier = None
        self._metrics.is_disabled = 1
        logger.warning("running without the KV cache: %s", why)

    def _disable(self, why: str) -> None:
        self._suspend(why)
        self._on_change()

    def _close(self) -> None:
        self._link.stop_worker()
        self.tier = None
        self._end_all()
        while not self._stop.is_set():
            due_s = self._settling.release_quarantine(time.monotonic())
            if due_s is None:
                break
            self._stop.wait(due_s - time.monotonic())
        self._link.leave()  # takes back whatever is still staged, with the quarantine of the region
