"""Blocks moved by a GPU's copy engine: a copy for each segment, many with one driver call.

That suits parts in many tensors (one for each layer, say) whose segments are not too short.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flexkv_radix._copy import ffi, lib
from flexkv_radix.transfer.cuda_driver import check, find_function
from flexkv_radix.transfer.protocol import OpKind, TransferOp
from flexkv_radix.transfer.segments import Segment


@functools.cache
def batch_function() -> tuple[int, bool]:
    """Address of the driver's function and whether it is that of CUDA 12; (0, False): it has none."""
    address = find_function("cuMemcpyBatchAsync_v2")
    if address:
        return address, False
    address = find_function("cuMemcpyBatchAsync")
    return address, bool(address)


class BatchPlan:
    """Queues an op's segments on a stream of the active device."""

    def __init__(
        self, segments: Sequence[tuple[int, Segment]], pool_address: int, slot_stride_bytes: int
    ) -> None:
        """segments: with the addresses of their tensors."""
        self._segments: Any = ffi.new(
            "copy_segment[]",
            [
                (address + s.base_bytes, s.block_stride_bytes, s.num_bytes, s.slot_offset_bytes, 0)
                for address, s in segments
            ],
        )
        self._pool_address = pool_address
        self._slot_stride_bytes = slot_stride_bytes

    def enqueue(self, op: TransferOp, stream: int, function: tuple[int, bool] | None = None) -> None:
        """function: what to call in place of batch_function()."""
        address, is_cuda_12 = function or batch_function()
        code = lib.copy_enqueue_batch(
            address,
            is_cuda_12,
            stream,
            lib.COPY_TO_SLOTS if op.kind is OpKind.D2H else lib.COPY_FROM_SLOTS,
            self._segments,
            len(self._segments),
            self._pool_address,
            self._slot_stride_bytes,
            ffi.from_buffer("int64_t[]", op.gpu_blocks),
            ffi.from_buffer("int32_t[]", op.slots),
            len(op.slots),
        )
        check("cuMemcpyBatchAsync", code)
