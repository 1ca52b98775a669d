"""A rank's CUDA tensors, mapped into the worker."""

from __future__ import annotations

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.protocol import RankPart, RegisterRank


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

    def allocation(self, part: RankPart, tensor: int) -> int:
        """Address of the allocation that holds a tensor."""
        return self._allocations[self.rank.storages[part.tensors[tensor].storage].ipc_handle]

    def close(self) -> None:
        self.device.activate()
        while self._allocations:
            cuda_driver.close_memory(self._allocations.popitem()[1])
        if self.step_event:
            cuda_driver.event_destroy(self.step_event)
            self.step_event = 0
