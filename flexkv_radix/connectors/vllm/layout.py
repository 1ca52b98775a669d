"""How vLLM's KV blocks lie in memory, as the transfer worker needs it.

The bytes inside a block have an order of the attention backend's own (on CPUs even of the instruction
set's), so a block of a layer is taken as a run of bytes.  The order is part of the model's identity.

Engine-free: works on tensors alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flexkv_radix.layout import OpaqueBlockLayout


def block_planes(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, tokens_per_block: int, *, replicated: bool
) -> tuple[list[torch.Tensor], OpaqueBlockLayout]:
    """Tensors whose first dimension counts blocks, and their layout.

    kv_caches: a tensor per layer of shape [blocks, ...], or [2, blocks, ...] with K and V apart; a backend
    may cut each of the num_blocks blocks into several that follow each other.  replicated: every
    tensor-parallel rank holds the same bytes.  ValueError names the layer that cannot be moved.
    """
    planes = []
    shapes = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"kv_caches[{name!r}]: {type(tensor).__name__} instead of one tensor of blocks")
        for plane in _planes_of(name, tensor, num_blocks):
            planes.append(plane)
            shapes[_block_bytes(name, plane, num_blocks)] = name
    if len(shapes) != 1:
        raise ValueError(f"kv_caches: blocks differ in size between layers ({', '.join(shapes.values())})")
    ((num_bytes, stride_bytes),) = shapes
    layout = OpaqueBlockLayout(
        num_layer=len(planes),
        num_block=num_blocks,
        tokens_per_block=tokens_per_block,
        bytes_per_layer=num_bytes,
        block_stride_bytes=stride_bytes,
        replicated=replicated,
    )
    return planes, layout


def _planes_of(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    shape = tuple(tensor.shape)
    if shape and shape[0] and shape[0] % num_blocks == 0:
        return [tensor]
    if len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        return [tensor[0], tensor[1]]
    raise ValueError(f"kv_caches[{name!r}]: no dimension of {shape} counts {num_blocks} blocks")


def _block_bytes(name: str, plane: torch.Tensor, num_blocks: int) -> tuple[int, int]:
    """(bytes of one of num_blocks blocks, bytes from one to the next)."""
    itemsize = plane.element_size()
    num_bytes = math.prod(plane.shape[1:]) * itemsize
    if not _is_dense(plane):
        raise ValueError(f"kv_caches[{name!r}]: a block is not one run of bytes (strides {plane.stride()})")
    parts = plane.shape[0] // num_blocks
    stride_bytes = plane.stride(0) * itemsize
    if parts > 1 and stride_bytes != num_bytes:
        raise ValueError(f"kv_caches[{name!r}]: the {parts} parts of a block do not follow each other")
    return num_bytes * parts, stride_bytes * parts


def _is_dense(plane: torch.Tensor) -> bool:
    """Whether the elements of a block fill one run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(plane.stride()[1:], plane.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
