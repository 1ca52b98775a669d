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
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.cuda_kernel import DEFAULT_THREAD_BLOCKS, KernelPlan
from flexkv_radix.transfer.cuda_memory import CudaRankMemory
from flexkv_radix.transfer.cuda_plans import DEFAULT_QUEUE_THREADS, Plans, RankPlan
from flexkv_radix.transfer.cuda_queue import Queue, Scratch
from flexkv_radix.transfer.mover import LayerFds, Pending, Placement
from flexkv_radix.transfer.pinning import PinnedRange, chunk_ends, cuts_a_slot
from flexkv_radix.transfer.protocol import CudaPath, OpKind, TransferConfig, TransferOp


class _Lane:
    """What one stream does of a rank's share: stages that end in order."""

    def __init__(self, queue: Queue) -> None:
        self.num_over = 0  # stages
        self.error: Exception | None = None
        self._queue = queue
        self._scratch: Scratch | None = None
        self._events: deque[int] = deque()  # of the stages that are not over

    def enqueue(self, plan: RankPlan, op: TransferOp) -> None:
        """Queue plan's work for op's blocks.  If that fails, what was queued is still waited for."""
        stream = self._queue.stream
        with self._queue.lock:
            try:
                self._queue.device.activate()
                if plan.memory.step_event:
                    cuda_driver.stream_wait(stream, plan.memory.step_event)
                if isinstance(plan.work, KernelPlan):
                    self._scratch = self._queue.take_scratch(len(op.slots), len(plan.layers))
                    plan.work.enqueue(op, self._scratch, stream)
                    self._events.append(self._queue.record_event())
                    return
                for stage in plan.work:
                    stage.enqueue(op, stream)
                    self._events.append(self._queue.record_event())
            except Exception as error:  # noqa: BLE001 - whatever it is, the op failed, but not before it is over
                self.error = error
                with contextlib.suppress(cuda_driver.CudaError):  # then nothing runs there any more
                    self._events.append(self._queue.record_event())

    def is_over(self) -> bool:
        """Whether nothing of it is under way any more, be it done or failed."""
        try:
            self._queue.device.activate()
            while self._events and cuda_driver.is_event_done(self._events[0]):
                self._queue.give_back_event(self._events.popleft())
                self.num_over += 1
        except cuda_driver.CudaError as error:  # of the context: whatever ran in it has ended
            self.error = error
            self._events.clear()
        return not self._events

    def num_announced(self, num_groups: int) -> int:
        """How many of a kernel's groups, in order, are in place."""
        if self._scratch is None:
            return num_groups
        missing = np.flatnonzero(self._scratch.announced[:num_groups] == 0)
        return int(missing[0]) if len(missing) else num_groups

    def give_back_scratch(self) -> None:
        """The lane is over and did not fail."""
        if self._scratch is not None:
            self._queue.give_back_scratch(self._scratch)
            self._scratch = None


class _Launched:
    """One rank's share of an op under way: its blocks among lanes, and the layers to announce.

    A layer is in place once every lane is past the stage that brings it.
    """

    def __init__(self, plan: RankPlan, lanes: Sequence[_Lane], rank_fds: Sequence[int] | None) -> None:
        self._lanes = lanes
        self._is_kernel = isinstance(plan.work, KernelPlan)
        self._stage_fds = [_pick(rank_fds, layers) for layers in plan.layers]
        self._num_signalled = 0  # stages

    @property
    def error(self) -> Exception | None:
        return next((lane.error for lane in self._lanes if lane.error is not None), None)

    def is_over(self) -> bool:
        """Whether nothing of it is under way any more, be it done or failed."""
        num_over = sum(lane.is_over() for lane in self._lanes)  # every lane is looked at
        if self.error is None:
            self._signal()
            if num_over == len(self._lanes):
                for lane in self._lanes:
                    lane.give_back_scratch()
        return num_over == len(self._lanes)

    def _signal(self) -> None:
        if self._is_kernel:
            num_stages = self._lanes[0].num_announced(len(self._stage_fds))
        else:
            num_stages = min(lane.num_over for lane in self._lanes)
        for fds in self._stage_fds[self._num_signalled : num_stages]:
            for fd in fds:
                os.eventfd_write(fd, 1)
        self._num_signalled = max(self._num_signalled, num_stages)


class _Transfer:
    """All ranks' shares of one op."""

    def __init__(self, launched: Sequence[_Launched]) -> None:
        self._launched = launched

    def is_done(self) -> bool:
        """Raises what a share failed with, but not before all are over: nobody may still write the slots."""
        num_over = sum(launched.is_over() for launched in self._launched)  # every rank is looked at
        if num_over < len(self._launched):
            return False
        for launched in self._launched:
            if launched.error is not None:
                raise launched.error
        return True


class CudaMover:
    """Moves blocks on streams of its own; start() returns once they are queued."""

    def __init__(self, placement: Placement, config: TransferConfig) -> None:
        devices = _devices(placement)
        store = placement.store
        pools = list(store.pools.values())
        ends = chunk_ends(store.num_bytes, pools)
        self._pinned = PinnedRange(
            store.address, ends, cuda_driver.host_register, cuda_driver.host_unregister
        )
        path, thread_blocks = config.cuda_path, config.thread_blocks
        if cuts_a_slot(ends, pools) or (thread_blocks and path is CudaPath.AUTO):
            path = CudaPath.KERNEL
        self._plans = {
            component: Plans(placement, component, thread_blocks or DEFAULT_THREAD_BLOCKS, path)
            for component in placement.parts
        }
        self._num_lanes = config.queue_threads or DEFAULT_QUEUE_THREADS
        self._queues = {
            (device, kind): [Queue(device) for _ in range(self._num_lanes)]
            for device in devices
            for kind in OpKind
        }
        num_threads = len(devices) * self._num_lanes
        self._threads = {kind: ThreadPoolExecutor(num_threads, f"queue-{kind.name}") for kind in OpKind}

    def start(self, op: TransferOp, layer_fds: LayerFds) -> Pending:
        plans = self._plans[op.component].of(op)
        if len(op.slots) == 0:
            _signal_all(plans, layer_fds)
            return _Transfer([])
        launched: list[_Launched] = []
        work: list[tuple[_Lane, RankPlan, TransferOp]] = []
        for plan in plans:
            shares = _shares(op, plan.num_lanes(len(op.slots), self._num_lanes))
            queues = self._queues[plan.memory.device, op.kind]
            lanes = [_Lane(queue) for queue, _ in zip(queues, shares, strict=False)]
            work += [(lane, plan, share) for lane, share in zip(lanes, shares, strict=True)]
            rank_fds = layer_fds[plan.place] if layer_fds is not None else None
            launched.append(_Launched(plan, lanes, rank_fds))
        if len(work) == 1:
            _enqueue(work[0])
        else:
            list(self._threads[op.kind].map(_enqueue, work))
        return _Transfer(launched)

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown()
        for queue in chain.from_iterable(self._queues.values()):
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


def _shares(op: TransferOp, num_lanes: int) -> list[TransferOp]:
    """op's blocks, shared among lanes."""
    if num_lanes == 1:
        return [op]
    ends = [len(op.slots) * lane // num_lanes for lane in range(num_lanes + 1)]
    return [
        replace(op, gpu_blocks=op.gpu_blocks[first:end], slots=op.slots[first:end])
        for first, end in pairwise(ends)
    ]


def _enqueue(work: tuple[_Lane, RankPlan, TransferOp]) -> None:
    lane, plan, op = work
    lane.enqueue(plan, op)


def _pick(fds: Sequence[int] | None, layers: Iterable[int]) -> list[int]:
    return [fds[layer] for layer in layers] if fds is not None else []


def _signal_all(plans: Iterable[RankPlan], layer_fds: LayerFds) -> None:
    for plan in plans:
        for layers in plan.layers:
            for fd in _pick(layer_fds[plan.place] if layer_fds is not None else None, layers):
                os.eventfd_write(fd, 1)
