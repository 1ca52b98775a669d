"""A thread that carries out ops of one direction in order.

Loads and stores have a lane each, so that a long store does not hold up a load.  A lane starts as
many ops as the mover takes (on CUDA they queue on a stream) and reports each when it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from flexkv_radix.transfer.mover import Mover, Pending, Placement
from flexkv_radix.transfer.protocol import OpKind, OpResult, TransferOp
from flexkv_radix.transfer.signals import LayerSignals

_POLL_S = 20e-6  # between looks at the op under way; its completion is seen that much late

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Equipment:
    """What ops are carried out with while all ranks are there."""

    placement: Placement
    mover: Mover


@dataclass(frozen=True)
class _Running:
    op: TransferOp
    pending: Pending
    num_bytes: int
    started_ns: int


# An op with what to carry it out with, or why that is not possible; or a barrier; or the end.
_Item: TypeAlias = "tuple[TransferOp, Equipment | str] | threading.Event | None"


class Lane:
    """Runs ops one after the other and reports every one exactly once."""

    def __init__(self, kind: OpKind, report: Callable[[OpResult], None], signals: LayerSignals) -> None:
        self._report = report
        self._signals = signals
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._running: deque[_Running] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"lane-{kind.name}", daemon=True)
        self._thread.start()

    def submit(self, op: TransferOp, equipment: Equipment | str) -> None:
        """Queue op; equipment as a string is the error it fails with."""
        self._queue.put((op, equipment))

    def drain(self) -> None:
        """Return when everything submitted so far is over."""
        barrier = threading.Event()
        self._queue.put(barrier)
        barrier.wait()

    def stop(self) -> None:
        """Return when what was started is over; what was not has failed."""
        self._is_stopping = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_POLL_S if self._running else None)
            except queue.Empty:
                self._finish_done()
                continue
            if isinstance(item, tuple):
                self._start(*item)
                self._finish_done()
                continue
            while self._running:
                self._finish_done()
                time.sleep(_POLL_S)
            if item is None:
                return
            item.set()

    def _start(self, op: TransferOp, equipment: Equipment | str) -> None:
        started_ns = time.monotonic_ns()
        if self._is_stopping:
            equipment = "the engine stops"
        if isinstance(equipment, str):
            self._report_failure(op, started_ns, equipment)
            return
        try:
            equipment.placement.check(op)
            layer_fds = self._signals.layer_fds(op.counter_id) if op.layerwise else None
            pending = equipment.mover.start(op, layer_fds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the op failed and the lane goes on
            self._fail(op, started_ns, error)
        else:
            num_bytes = equipment.placement.moved_bytes(op)
            self._running.append(_Running(op, pending, num_bytes, started_ns))

    def _finish_done(self) -> None:
        while self._running:
            running = self._running[0]
            try:
                if not running.pending.is_done():
                    return
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(running.op, running.started_ns, error)
            else:
                finished_ns = time.monotonic_ns()
                result = OpResult(
                    running.op.op_id, True, "", running.num_bytes, running.started_ns, finished_ns
                )
                self._report(result)
            self._running.popleft()

    def _fail(self, op: TransferOp, started_ns: int, error: Exception) -> None:
        logger.error("%s op %d failed", op.kind.name, op.op_id, exc_info=error)
        self._report_failure(op, started_ns, str(error))

    def _report_failure(self, op: TransferOp, started_ns: int, error: str) -> None:
        if op.layerwise:
            self._signals.announce_failure(op.counter_id)
        self._report(OpResult(op.op_id, False, error, 0, started_ns, time.monotonic_ns()))
