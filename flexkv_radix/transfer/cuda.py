"""Transfers between CUDA tensors and slots.

    engine's process          transfer worker
    cudaMalloc'ed tensors --> CUDA IPC mapping  \
                                                 a plan per rank, on streams of the worker's own
    SlotStore (shared)    --> pinned            /

A plan is either work for the copy engine (cuda_rows.py, cuda_batch.py) or one kernel (cuda_kernel.py);
cuda_plans.py chooses.

Order against the engine's own work
    loads    an op is done when its kernel is: kernels that the engine launches after it saw the
             result (or a layer's eventfd) see the bytes.
    both     before it touches blocks, a kernel waits for the last record of the rank's step event, if
             the rank registered one.  A rank without one must have synchronised the step that wrote
             (or still read) the blocks before the op is submitted, as engines do that read the
             step's tokens back before they finish a request.
"""

from __future__ import annotations

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
    """One rank's share of an op under way."""

    def __init__(self, queue: Queue, scratch: Scratch | None, group_fds: Sequence[int]) -> None:
        self._queue = queue
        self._scratch = scratch
        self._group_fds = group_fds  # of the kernel's groups, in order
        self._num_signalled = 0
        self._stages: deque[tuple[int, Sequence[int]]] = deque()

    def add_stage(self, fds: Sequence[int]) -> None:
        """fds are signalled when everything queued so far is over."""
        self._stages.append((self._queue.record_event(), fds))

    def is_done(self) -> bool:
        self._queue.device.activate()
        while self._stages and cuda_driver.is_event_done(self._stages[0][0]):
            event, fds = self._stages.popleft()
            for fd in fds:
                os.eventfd_write(fd, 1)
            self._queue.give_back_event(event)
        self._signal_groups()
        if not self._stages and self._scratch is not None:
            self._queue.give_back_scratch(self._scratch)
            self._scratch = None
        return not self._stages

    def _signal_groups(self) -> None:
        if self._scratch is None:
            return
        while self._num_signalled < len(self._group_fds) and self._scratch.announced[self._num_signalled]:
            os.eventfd_write(self._group_fds[self._num_signalled], 1)
            self._num_signalled += 1


class _Transfer:
    """All ranks' shares of one op."""

    def __init__(self, launched: Sequence[_Launched]) -> None:
        self._launched = launched

    def is_done(self) -> bool:
        num_done = sum(launched.is_done() for launched in self._launched)  # every rank is looked at
        return num_done == len(self._launched)


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
        fds = layer_fds[plan.place] if layer_fds is not None else None
        with queue.lock:
            queue.device.activate()
            if plan.memory.step_event:
                cuda_driver.stream_wait(queue.stream, plan.memory.step_event)
            if isinstance(plan.work, KernelPlan):
                scratch = queue.take_scratch(len(op.slots), len(plan.layers))
                plan.work.enqueue(op, scratch, queue.stream)
                launched = _Launched(queue, scratch, _pick(fds, plan.layers))
                launched.add_stage(())
                return launched
            launched = _Launched(queue, None, ())
            for stage in plan.work:
                stage.work.enqueue(op, queue.stream)
                launched.add_stage(_pick(fds, stage.layers))
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
