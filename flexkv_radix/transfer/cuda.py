"""Transfers between CUDA tensors and slots.

    engine's process          transfer worker
    cudaMalloc'ed tensors --> CUDA IPC mapping  \
                                                 a plan per rank, on streams of the worker's own
    SlotStore (shared)    --> pinned            /

A plan is either work for the copy engine (cuda_rows.py, cuda_batch.py) or one kernel (cuda_kernel.py);
cuda_plans.py chooses.

Order against the engine's own work
    loads    an op is done when its bytes are in place: kernels that the engine launches after it saw
             the result (or a layer's eventfd) see them.
    both     before blocks are touched, the stream waits for the last record of the rank's step event,
             if the rank registered one.  A rank without one must have synchronised the step that wrote
             (or still read) the blocks before the op is submitted, as engines do that read the
             step's tokens back before they finish a request.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.cuda_kernel import DEFAULT_THREAD_BLOCKS, KernelPlan
from flexkv_radix.transfer.cuda_memory import CudaRankMemory
from flexkv_radix.transfer.cuda_plans import Plans, RankPlan
from flexkv_radix.transfer.cuda_queue import Queue, Scratch
from flexkv_radix.transfer.mover import LayerFds, Pending, Placement
from flexkv_radix.transfer.pinning import PinnedRange, chunk_ends, cuts_a_slot
from flexkv_radix.transfer.protocol import CudaPath, OpKind, TransferOp


class _Launched:
    """One rank's share of an op under way: stages that end in order, each with layers to announce."""

    def __init__(self, queue: Queue) -> None:
        self.error: cuda_driver.CudaError | None = None
        self._queue = queue
        self._scratch: Scratch | None = None
        self._group_fds: Sequence[int] = ()  # of a kernel's groups, in order
        self._num_signalled = 0
        self._stages: deque[tuple[int, Sequence[int]]] = deque()

    def enqueue(self, plan: RankPlan, op: TransferOp, rank_fds: Sequence[int] | None) -> None:
        """Queue plan's work on the active device.  If that fails, what was queued is still waited for."""
        stream = self._queue.stream
        try:
            if plan.memory.step_event:
                cuda_driver.stream_wait(stream, plan.memory.step_event)
            if isinstance(plan.work, KernelPlan):
                self._scratch = self._queue.take_scratch(len(op.slots), len(plan.layers))
                self._group_fds = _pick(rank_fds, plan.layers)
                plan.work.enqueue(op, self._scratch, stream)
                self._add_stage(())
                return
            for stage in plan.work:
                stage.work.enqueue(op, stream)
                self._add_stage(_pick(rank_fds, stage.layers))
        except cuda_driver.CudaError as error:
            self.error = error
            with contextlib.suppress(cuda_driver.CudaError):  # then nothing runs there any more
                self._add_stage(())

    def _add_stage(self, fds: Sequence[int]) -> None:
        """fds are signalled when everything queued so far is over."""
        self._stages.append((self._queue.record_event(), fds))

    def is_over(self) -> bool:
        """Whether nothing of it is under way any more, be it done or failed."""
        try:
            self._advance()
        except cuda_driver.CudaError as error:  # of the context: whatever ran in it has ended
            self.error = error
            self._stages.clear()
        return not self._stages

    def _advance(self) -> None:
        self._queue.device.activate()
        while self._stages and cuda_driver.is_event_done(self._stages[0][0]):
            event, fds = self._stages.popleft()
            for fd in fds:
                os.eventfd_write(fd, 1)
            self._queue.give_back_event(event)
        if self._scratch is None or self.error is not None:
            return
        while self._num_signalled < len(self._group_fds) and self._scratch.announced[self._num_signalled]:
            os.eventfd_write(self._group_fds[self._num_signalled], 1)
            self._num_signalled += 1
        if not self._stages:
            self._queue.give_back_scratch(self._scratch)
            self._scratch = None


class _Transfer:
    """All ranks' shares of one op."""

    def __init__(self, launched: Sequence[_Launched]) -> None:
        self._launched = launched

    def is_done(self) -> bool:
        """CudaError if a share failed, but not before all are over: nobody may still write the slots."""
        num_over = sum(launched.is_over() for launched in self._launched)  # every rank is looked at
        if num_over < len(self._launched):
            return False
        for launched in self._launched:
            if launched.error is not None:
                raise launched.error
        return True


class CudaMover:
    """Moves blocks on streams of its own; start() returns once they are queued."""

    def __init__(self, placement: Placement, thread_blocks: int, path: CudaPath) -> None:
        devices = _devices(placement)
        store = placement.store
        pools = list(store.pools.values())
        ends = chunk_ends(store.num_bytes, pools)
        self._pinned = PinnedRange(
            store.address, ends, cuda_driver.host_register, cuda_driver.host_unregister
        )
        if cuts_a_slot(ends, pools) or (thread_blocks and path is CudaPath.AUTO):
            path = CudaPath.KERNEL
        self._plans = {
            component: Plans(placement, component, thread_blocks or DEFAULT_THREAD_BLOCKS, path)
            for component in placement.parts
        }
        self._queues = {(device, kind): Queue(device) for device in devices for kind in OpKind}
        # Commands for many GPUs are queued side by side, for each takes the driver about 2 us.
        self._threads = {kind: ThreadPoolExecutor(len(devices), f"queue-{kind.name}") for kind in OpKind}

    def start(self, op: TransferOp, layer_fds: LayerFds) -> Pending:
        plans = self._plans[op.component].of(op)
        if len(op.slots) == 0:
            _signal_all(plans, layer_fds)
            return _Transfer([])
        if len(plans) == 1:
            return _Transfer([self._launch(plans[0], op, layer_fds)])
        launched = self._threads[op.kind].map(lambda plan: self._launch(plan, op, layer_fds), plans)
        return _Transfer(list(launched))

    def _launch(self, plan: RankPlan, op: TransferOp, layer_fds: LayerFds) -> _Launched:
        queue = self._queues[plan.memory.device, op.kind]
        launched = _Launched(queue)
        with queue.lock:
            queue.device.activate()
            launched.enqueue(plan, op, layer_fds[plan.place] if layer_fds is not None else None)
        return launched

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown()
        for queue in self._queues.values():
            queue.close()
        for plans in self._plans.values():
            plans.close()
        self._pinned.close()


def _devices(placement: Placement) -> set[Device]:
    """The ranks' devices, one of them active; RuntimeError if one cannot do what transfers need."""
    devices = set()
    for parts in placement.parts.values():
        for placed in parts:
            assert isinstance(placed.memory, CudaRankMemory)
            devices.add(placed.memory.device)
    for device in devices:
        device.check_host_pointers()
        device.activate()
    return devices


def _pick(fds: Sequence[int] | None, layers: Iterable[int]) -> list[int]:
    return [fds[layer] for layer in layers] if fds is not None else []


def _signal_all(plans: Iterable[RankPlan], layer_fds: LayerFds) -> None:
    for plan in plans:
        for fd in _pick(layer_fds[plan.place] if layer_fds is not None else None, plan.layers):
            os.eventfd_write(fd, 1)
