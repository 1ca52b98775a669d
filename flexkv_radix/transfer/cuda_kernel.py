"""The kernel that moves blocks between GPU memory and pinned host memory, and its tables.

A few thread blocks suffice, for the bus is the limit.  They take pieces (of at most PIECE_BYTES) in
turn, group after group, so that groups finish in order; a finished group is announced by a word in
host memory.  Each thread keeps UNROLL loads in flight.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_compiler import compile_program
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.cuda_queue import Scratch
from flexkv_radix.transfer.protocol import OpKind, TransferOp
from flexkv_radix.transfer.segments import Segment

NUM_THREADS = 512
UNROLL = 4
PIECE_BYTES = NUM_THREADS * UNROLL * 16  # one round of the widest loads
DEFAULT_THREAD_BLOCKS = 16

PIECE = np.dtype([("engine", "<u8"), ("block_stride", "<u8"), ("slot_offset", "<u8"), ("num_bytes", "<u8")])
_VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef struct { u64 engine, block_stride, slot_offset, num_bytes; } piece;

static __device__ __forceinline__ void copy_piece(VECTOR *to, const VECTOR *from, u64 n)
{
    VECTOR held[UNROLL];
    for (u64 i = threadIdx.x; i < n; i += (u64)UNROLL * blockDim.x) {
        #pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + (u64)k * blockDim.x < n)
                held[k] = LOAD(from + i + (u64)k * blockDim.x);
        #pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + (u64)k * blockDim.x < n)
                STORE(to + i + (u64)k * blockDim.x, held[k]);
    }
}

/* A thread block moved `mine` of a group's `all` pieces.  The last one to report announces the group:
 * the barrier and the fences order every thread's bytes before the count, and the count before the
 * announcement.  It leaves the counter at 0 for the next launch. */
static __device__ void report(u32 *done, volatile u32 *announced, u64 mine, u64 all)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(done, (u32)mine) + mine == all) {
            *done = 0;
            __threadfence_system();
            *announced = 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
move_blocks(const piece *pieces, const u32 *group_end, u32 num_groups, u32 to_slots,
            const long long *blocks, const int *slots, u64 n, u64 pool, u64 slot_stride,
            u32 *done, volatile u32 *announced)
{
    u64 first = 0, turn = blockIdx.x;
    for (u32 g = 0, begin = 0; g < num_groups; begin = group_end[g], g++) {
        u64 per_block = group_end[g] - begin, all = n * per_block, mine = 0;
        for (; turn < first + all; turn += gridDim.x, mine++) {
            u64 i = (turn - first) / per_block;
            piece p = pieces[begin + (turn - first) % per_block];
            VECTOR *engine = (VECTOR *)(p.engine + (u64)blocks[i] * p.block_stride);
            VECTOR *host = (VECTOR *)(pool + (u64)slots[i] * slot_stride + p.slot_offset);
            if (to_slots)
                copy_piece(host, engine, p.num_bytes / sizeof(VECTOR));
            else
                copy_piece(engine, host, p.num_bytes / sizeof(VECTOR));
        }
        if (announced && mine)
            report(done + g, announced + g, mine, all);
        first += all;
    }
}
"""


class Arguments(ctypes.Structure):
    """Parameters of move_blocks.  done and announced are 0 where nobody waits for single groups."""

    _fields_ = [
        ("pieces", c_uint64),
        ("group_end", c_uint64),
        ("num_groups", c_uint32),
        ("to_slots", c_uint32),
        ("blocks", c_uint64),
        ("slots", c_uint64),
        ("n", c_uint64),
        ("pool", c_uint64),
        ("slot_stride", c_uint64),
        ("done", c_uint64),
        ("announced", c_uint64),
    ]


@dataclass(frozen=True)
class Pieces:
    """Tables of one plan: pieces [num_pieces] of dtype PIECE, group_end uint32 [num_groups]."""

    pieces: npt.NDArray[np.void]
    group_end: npt.NDArray[np.uint32]

    @property
    def num_groups(self) -> int:
        return len(self.group_end)

    def vector_bytes(self, pool_address: int, slot_stride_bytes: int) -> int:
        """Widest access (16, 8, 4, 2 or 1 bytes) that every address and length is a multiple of."""
        values = [pool_address, slot_stride_bytes, 16, *(int(v) for v in self._distinct())]
        return math.gcd(*values)

    def _distinct(self) -> npt.NDArray[Any]:
        return np.unique(np.concatenate([self.pieces[name] for name in PIECE.names or ()]))


def cut(groups: Sequence[Sequence[tuple[int, Segment]]]) -> Pieces:
    """Cut groups of (tensor address, segment) into pieces."""
    pieces: list[tuple[int, int, int, int]] = []
    group_end = []
    for group in groups:
        for address, s in group:
            for start in range(0, s.num_bytes, PIECE_BYTES):
                num_bytes = min(PIECE_BYTES, s.num_bytes - start)
                engine = address + s.base_bytes + start
                pieces.append((engine, s.block_stride_bytes, s.slot_offset_bytes + start, num_bytes))
        group_end.append(len(pieces))
    return Pieces(np.array(pieces, dtype=PIECE), np.array(group_end, dtype=np.uint32))


class KernelPlan:
    """Pieces on a device, which has to be active for every call, and the kernel that fits them."""

    def __init__(
        self, device: Device, pieces: Pieces, pool_address: int, slot_stride_bytes: int, thread_blocks: int
    ) -> None:
        self._device = device
        self._thread_blocks = thread_blocks
        self._pool_address = pool_address
        self._slot_stride_bytes = slot_stride_bytes
        self._kernel = _kernel(device, pieces.vector_bytes(pool_address, slot_stride_bytes))
        self._num_pieces, self._num_groups = len(pieces.pieces), pieces.num_groups
        self._pieces = _upload(pieces.pieces)
        self._group_end = _upload(pieces.group_end)

    def enqueue(self, op: TransferOp, scratch: Scratch, stream: int) -> None:
        """Queue op's kernel; with layerwise ops it announces groups in scratch."""
        scratch.upload(op, stream)
        arguments = Arguments(
            self._pieces,
            self._group_end,
            self._num_groups,
            int(op.kind is OpKind.D2H),
            scratch.blocks_address,
            scratch.slots_address,
            len(op.slots),
            self._pool_address,
            self._slot_stride_bytes,
            scratch.done_address if op.layerwise else 0,
            scratch.announced_address if op.layerwise else 0,
        )
        thread_blocks = min(self._thread_blocks, self._num_pieces * len(op.slots))
        cuda_driver.launch(self._kernel, thread_blocks, NUM_THREADS, stream, arguments)

    def close(self) -> None:
        self._device.activate()
        cuda_driver.device_free(self._pieces)
        cuda_driver.device_free(self._group_end)


def _upload(array: npt.NDArray[Any]) -> int:
    address = cuda_driver.device_alloc(array.nbytes)
    cuda_driver.copy_to_device(address, array.ctypes.data, array.nbytes)
    return address


@functools.cache
def _kernel(device: Device, vector_bytes: int) -> int:
    """move_blocks for accesses of vector_bytes, loaded on device, which has to be active."""
    defines = {
        "VECTOR": _VECTORS[vector_bytes],
        "UNROLL": str(UNROLL),
        "NUM_THREADS": str(NUM_THREADS),
        "LOAD": "__ldcs",
        "STORE": "__stcs",
    }
    module = cuda_driver.load_module(compile_program(SOURCE, device, defines))
    return cuda_driver.get_function(module, "move_blocks")
