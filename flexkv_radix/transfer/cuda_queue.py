"""A stream of one device and direction, with the memory that ops in flight need beside their blocks."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.protocol import TransferOp

_MIN_IDS = 1024
_BYTES_PER_ID = 12  # int64 block, int32 slot


class Scratch:
    """What one op in flight needs: its ids on the device, and counters and announcements of groups.

    device   | blocks int64[n] | slots int32[n] | ...    done uint32[num_groups], 0 between ops
    host     | blocks          | slots          | ...    announced uint32[num_groups], set by the kernel
    """

    def __init__(self, max_ids: int, num_groups: int) -> None:
        self.max_ids = max_ids
        self.num_groups = num_groups
        self.blocks_address = cuda_driver.device_alloc(max_ids * _BYTES_PER_ID)
        self.done_address = cuda_driver.device_alloc(4 * num_groups)
        cuda_driver.device_clear(self.done_address, 4 * num_groups)
        self._host_address = cuda_driver.host_alloc(max_ids * _BYTES_PER_ID + 4 * num_groups)
        self.announced_address = self._host_address + max_ids * _BYTES_PER_ID
        announced = (ctypes.c_uint32 * num_groups).from_address(self.announced_address)
        self.announced = np.ctypeslib.as_array(announced)
        self.slots_address = 0

    def upload(self, op: TransferOp, stream: int) -> None:
        """Put op's ids on the device, in stream's order."""
        self.announced[:] = 0
        self.slots_address = self.blocks_address + op.gpu_blocks.nbytes
        ctypes.memmove(self._host_address, op.gpu_blocks.ctypes.data, op.gpu_blocks.nbytes)
        ctypes.memmove(self._host_address + op.gpu_blocks.nbytes, op.slots.ctypes.data, op.slots.nbytes)
        num_bytes = op.gpu_blocks.nbytes + op.slots.nbytes
        cuda_driver.copy_to_device_async(self.blocks_address, self._host_address, num_bytes, stream)

    def close(self) -> None:
        cuda_driver.device_free(self.blocks_address)
        cuda_driver.device_free(self.done_address)
        cuda_driver.host_free(self._host_address)


class Queue:
    """A stream, its events and scratch.  lock: held to queue an op, when several threads do."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self._idle: list[Scratch] = []
        self._idle_events: list[int] = []
        device.activate()
        self.stream = cuda_driver.new_stream()

    def take_scratch(self, num_ids: int, num_groups: int) -> Scratch:
        """Scratch for an op of num_ids; the device has to be active."""
        for index, scratch in enumerate(self._idle):
            if scratch.max_ids >= num_ids and scratch.num_groups >= num_groups:
                return self._idle.pop(index)
        return Scratch(max(_MIN_IDS, 1 << (num_ids - 1).bit_length()), num_groups)

    def record_event(self) -> int:
        """An event that is over when everything queued so far is."""
        event = self._idle_events.pop() if self._idle_events else cuda_driver.new_event()
        cuda_driver.event_record(event, self.stream)
        return event

    def give_back_event(self, event: int) -> None:
        """event is over."""
        self._idle_events.append(event)

    def give_back_scratch(self, scratch: Scratch) -> None:
        """What scratch was taken for is over."""
        self._idle.append(scratch)

    def close(self) -> None:
        self.device.activate()
        cuda_driver.stream_synchronize(self.stream)
        for scratch in self._idle:
            scratch.close()
        for event in self._idle_events:
            cuda_driver.event_destroy(event)
        self._idle.clear()
        self._idle_events.clear()
        cuda_driver.stream_destroy(self.stream)
