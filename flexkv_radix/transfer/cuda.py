"""Transfers between CUDA tensors and slots.

    engine's process          transfer worker
    cudaMalloc'ed tensors --> CUDA IPC mapping  \
                                                 one kernel per op and rank, on streams of its own
    SlotStore (shared)    --> pinned, mapped    /

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.cuda_kernel import DEFAULT_THREAD_BLOCKS, NUM_THREADS, Arguments, cut, kernel
from flexkv_radix.transfer.cuda_queue import Queue, Scratch
from flexkv_radix.transfer.mover import LayerFds, Pending, PlacedPart, Placement
from flexkv_radix.transfer.pinning import PinnedRange
from flexkv_radix.transfer.protocol import OpKind, RankPart, RankPlace, RegisterRank, TransferOp
from flexkv_radix.transfer.segments import Segment, by_layer, coalesce
from radixshmem.geometry import ComponentType


class CudaRankMemory:
    """A rank's CUDA storages, mapped through IPC on the rank's own device."""

    def __init__(self, rank: RegisterRank) -> None:
        self.rank = rank
        self.device = Device.by_uuid(rank.device_uuid)
        self.device.activate()
        self.step_event = cuda_driver.open_event(rank.step_event) if rank.step_event else 0
        self._allocations: dict[bytes, int] = {}
        try:
            self._storages = [self._open(index) for index in range(len(rank.storages))]
        except BaseException:
            self.close()
            raise

    def _open(self, index: int) -> int:
        storage = self.rank.storages[index]
        if storage.ipc_handle not in self._allocations:
            self._allocations[storage.ipc_handle] = cuda_driver.open_memory(storage.ipc_handle)
        base = self._allocations[storage.ipc_handle]
        _, num_bytes = cuda_driver.address_range(base)
        if storage.ipc_offset_bytes < 0 or storage.ipc_offset_bytes + storage.num_bytes > num_bytes:
            raise ValueError(
                f"{self.rank.place}: storage {index} exceeds its allocation of {num_bytes} bytes"
            )
        return base + storage.ipc_offset_bytes

    def tensor_address(self, part: RankPart, tensor: int) -> int:
        view = part.tensors[tensor]
        return self._storages[view.storage] + view.offset_bytes

    def close(self) -> None:
        self.device.activate()
        while self._allocations:
            cuda_driver.close_memory(self._allocations.popitem()[1])
        if self.step_event:
            cuda_driver.event_destroy(self.step_event)
            self.step_event = 0


class _Table:
    """One rank's pieces on its device, in groups, and the kernel that fits them."""

    def __init__(self, placement: Placement, placed: PlacedPart, groups: Sequence[Sequence[Segment]]) -> None:
        assert isinstance(placed.memory, CudaRankMemory)
        self.memory = placed.memory
        self.place: RankPlace = placed.place
        self.layers = [group[0].layer for group in groups]
        pieces = cut(
            [[(self.memory.tensor_address(placed.part, s.tensor), s) for s in group] for group in groups]
        )
        component = placed.part.component
        self._pool_address = placement.store.pool_address(component)
        self._slot_stride = placement.store.pool(component).stride_bytes
        self.memory.device.activate()
        self._kernel = kernel(self.memory.device, pieces.vector_bytes(self._pool_address, self._slot_stride))
        self._num_pieces = len(pieces.pieces)
        self._pieces = _upload(pieces.pieces)
        self._group_end = _upload(pieces.group_end)

    def launch(self, op: TransferOp, scratch: Scratch, stream: int, thread_blocks: int) -> None:
        arguments = Arguments(
            self._pieces,
            self._group_end,
            len(self.layers),
            int(op.kind is OpKind.D2H),
            scratch.blocks_address,
            scratch.slots_address,
            len(op.slots),
            self._pool_address,
            self._slot_stride,
            scratch.done_address if op.layerwise else 0,
            scratch.announced_address if op.layerwise else 0,
        )
        num_pieces = self._num_pieces * len(op.slots)
        cuda_driver.launch(self._kernel, min(thread_blocks, num_pieces), NUM_THREADS, stream, arguments)

    def close(self) -> None:
        self.memory.device.activate()
        cuda_driver.device_free(self._pieces)
        cuda_driver.device_free(self._group_end)


def _upload(array: npt.NDArray[Any]) -> int:
    address = cuda_driver.device_alloc(array.nbytes)
    cuda_driver.copy_to_device(address, array.ctypes.data, array.nbytes)
    return address


class _Launched:
    """One rank's kernel under way."""

    def __init__(self, queue: Queue, scratch: Scratch, fds: Sequence[int]) -> None:
        self._queue = queue
        self._scratch = scratch
        self._fds = fds  # by group; empty: nobody waits for groups
        self._num_signalled = 0
        self._is_done = False

    def is_done(self) -> bool:
        if self._is_done:
            return True
        self._queue.device.activate()
        is_done = cuda_driver.is_event_done(self._scratch.event)
        while self._num_signalled < len(self._fds) and self._scratch.announced[self._num_signalled]:
            os.eventfd_write(self._fds[self._num_signalled], 1)
            self._num_signalled += 1
        if is_done:
            self._is_done = True
            self._queue.give_back(self._scratch)
        return is_done


class _Transfer:
    """All ranks' kernels of one op."""

    def __init__(self, launched: Sequence[_Launched]) -> None:
        self._launched = launched

    def is_done(self) -> bool:
        num_done = sum(launched.is_done() for launched in self._launched)  # every rank is looked at
        return num_done == len(self._launched)


class CudaMover:
    """Moves blocks with a kernel per op and rank; start() returns once they are queued."""

    def __init__(self, placement: Placement, thread_blocks: int) -> None:
        self._thread_blocks = thread_blocks or DEFAULT_THREAD_BLOCKS
        memories = {
            id(placed.memory): placed.memory for parts in placement.parts.values() for placed in parts
        }
        devices = {memory.device for memory in memories.values() if isinstance(memory, CudaRankMemory)}
        for device in devices:
            device.check_host_pointers()
            device.activate()
        store = placement.store
        self._pinned = PinnedRange(
            store.address, store.num_bytes, cuda_driver.host_register, cuda_driver.host_unregister
        )
        self._stores = _tables(placement, lambda part: [coalesce(part.segments)] if part.stores else [])
        self._loads = _tables(placement, lambda part: [coalesce(part.segments)])
        self._layer_loads = _tables(placement, lambda part: by_layer(part.segments))
        num_groups = max(len(table.layers) for tables in self._layer_loads.values() for table in tables)
        self._queues = {(device, kind): Queue(device, num_groups) for device in devices for kind in OpKind}

    def start(self, op: TransferOp, layer_fds: LayerFds) -> Pending:
        if len(op.slots) == 0:
            _signal_all(self._tables(op), layer_fds)
            return _Transfer([])
        return _Transfer([self._launch(table, op, layer_fds) for table in self._tables(op)])

    def _tables(self, op: TransferOp) -> Sequence[_Table]:
        if op.kind is OpKind.D2H:
            return self._stores[op.component]
        return self._layer_loads[op.component] if op.layerwise else self._loads[op.component]

    def _launch(self, table: _Table, op: TransferOp, layer_fds: LayerFds) -> _Launched:
        queue = self._queues[table.memory.device, op.kind]
        queue.device.activate()
        scratch = queue.take_scratch(len(op.slots))
        if table.memory.step_event:
            cuda_driver.stream_wait(queue.stream, table.memory.step_event)
        scratch.upload(op, queue.stream)
        table.launch(op, scratch, queue.stream, self._thread_blocks)
        cuda_driver.event_record(scratch.event, queue.stream)
        return _Launched(queue, scratch, _fds(table, layer_fds))

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        for tables in (self._stores, self._loads, self._layer_loads):
            for table in (table for of_component in tables.values() for table in of_component):
                table.close()
        self._pinned.close()


def _tables(
    placement: Placement, groups_of: Callable[[RankPart], Sequence[Sequence[Segment]]]
) -> dict[ComponentType, list[_Table]]:
    return {
        component: [
            _Table(placement, placed, groups) for placed in parts if (groups := groups_of(placed.part))
        ]
        for component, parts in placement.parts.items()
    }


def _fds(table: _Table, layer_fds: LayerFds) -> list[int]:
    return [layer_fds[table.place][layer] for layer in table.layers] if layer_fds is not None else []


def _signal_all(tables: Iterable[_Table], layer_fds: LayerFds) -> None:
    for table in tables:
        for fd in _fds(table, layer_fds):
            os.eventfd_write(fd, 1)
