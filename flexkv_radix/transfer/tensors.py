"""Turns a rank's KV tensors into handles that the transfer worker can map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexkv_radix.transfer.protocol import StorageHandle, TensorView


@dataclass(frozen=True)
class SharedTensors:
    """Handles of some tensors of one device.  The tensors have to stay alive while they are in use."""

    storages: tuple[StorageHandle, ...]
    views: tuple[TensorView, ...]  # one per tensor
    fds: tuple[int, ...]  # one per CPU storage; owned by the storages
    device_uuid: str  # "": CPU


def share_tensors(tensors: Sequence[torch.Tensor]) -> SharedTensors:
    """Share tensors of one device; views of one storage share one handle.

    CPU storages are moved to shared memory in place.  Raises ValueError for tensors of several or
    other devices, RuntimeError (naming the cause) if CUDA memory cannot be shared.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(f"kv_caches: tensors of one device expected, got {sorted(map(str, devices))}")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"kv_caches: tensors are on {device}; CPU and CUDA are supported")
    storages: dict[int, torch.UntypedStorage] = {}
    fds: tuple[int, ...] = ()
    if device.type == "cpu":
        storages = _distinct_storages(tensors)
        fds = tuple(storage._share_fd_cpu_()[0] for storage in storages.values())
        storages = _distinct_storages(tensors)  # they have moved
        handles = tuple(StorageHandle(storage.nbytes()) for storage in storages.values())
        uuid = ""
    else:
        from flexkv_radix.transfer.cuda_driver import Device, export_memory

        storages = _distinct_storages(tensors)
        with torch.cuda.device(device):  # the driver looks up addresses in the current device's context
            torch.cuda.synchronize()
            handles = tuple(export_memory(address, storage.nbytes()) for address, storage in storages.items())
        uuid = Device.at(device.index).uuid
    order = {address: index for index, address in enumerate(storages)}
    return SharedTensors(handles, tuple(_view(tensor, order) for tensor in tensors), fds, uuid)


def _distinct_storages(tensors: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


def _view(tensor: torch.Tensor, order: dict[int, int]) -> TensorView:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return TensorView(
        storage=order[tensor.untyped_storage().data_ptr()],
        offset_bytes=int(tensor.storage_offset()) * tensor.element_size(),
        num_bytes=(last + 1) * tensor.element_size(),
    )
