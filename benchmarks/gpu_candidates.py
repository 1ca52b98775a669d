"""Ways to move blocks between GPU and pinned host memory, for gpu_kernels.py.

A candidate is a function run(to_slots) that queues one call on the bench's stream.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_size_t, c_uint64, c_void_p

import numpy as np
import torch

from flexkv_radix.transfer import cuda_driver, cuda_kernel
from flexkv_radix.transfer.cuda_batch import BatchPlan
from flexkv_radix.transfer.cuda_compiler import compile_program
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.cuda_kernel import SOURCE, Arguments, cut
from flexkv_radix.transfer.cuda_rows import RowPlan, rows_of
from flexkv_radix.transfer.protocol import OpKind, TransferOp
from flexkv_radix.transfer.segments import Segment
from radixshmem.geometry import ComponentType

NUM_LAYERS, KV_DIM, SEGMENT_BYTES, NUM_BLOCKS = 36, 2, 32 << 10, 768
SLOT_BYTES = NUM_LAYERS * KV_DIM * SEGMENT_BYTES

Run = Callable[[int], None]


class Bench:
    """Memory of both sides, and the ids of one call.  is_shared: slots in /dev/shm, as a SlotStore's."""

    def __init__(self, *, is_shared: bool) -> None:
        torch.cuda.init()
        shape = (NUM_LAYERS * KV_DIM, NUM_BLOCKS, SEGMENT_BYTES)
        self.gpu = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        self.host = _host_memory(NUM_BLOCKS * SLOT_BYTES, is_shared).reshape(NUM_BLOCKS, SLOT_BYTES)
        self.host[:] = 1
        self.device = Device.at(0)
        self.device.activate()
        cuda_driver.host_register(self.host.ctypes.data, self.host.nbytes)
        self.host_tensor = torch.from_numpy(self.host)
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self.stream = self.streams[0]
        self.flat_gpu = torch.empty(256 * SLOT_BYTES, dtype=torch.uint8, device="cuda")
        layer_bytes = NUM_BLOCKS * SEGMENT_BYTES
        self.segments = [
            Segment(i // KV_DIM, 0, i * layer_bytes, SEGMENT_BYTES, SEGMENT_BYTES, i * SEGMENT_BYTES)
            for i in range(NUM_LAYERS * KV_DIM)
        ]

    def set_ids(self, n: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n = n
        self.block_ids = rng.permutation(NUM_BLOCKS)[:n]
        self.slot_ids = rng.permutation(NUM_BLOCKS)[:n].astype(np.int32)
        self.blocks = torch.from_numpy(self.block_ids).cuda()
        self.slots = torch.from_numpy(self.slot_ids).cuda()
        torch.cuda.synchronize()

    def op(self, to_slots: int, first: int = 0, last: int | None = None) -> TransferOp:
        kind = OpKind.D2H if to_slots else OpKind.H2D
        return TransferOp(0, kind, ComponentType.FULL, self.block_ids[first:last], self.slot_ids[first:last])

    def tables(self, layers: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The kernel's tables on the device, and how many pieces a block has."""
        size = KV_DIM if layers else len(self.segments)
        groups = [self.segments[i : i + size] for i in range(0, len(self.segments), size)]
        pieces = cut([[(self.gpu.data_ptr(), s) for s in group] for group in groups])
        table = torch.from_numpy(pieces.pieces.view(np.uint8).copy()).cuda()
        return table, torch.from_numpy(pieces.group_end.view(np.int32).copy()).cuda(), len(pieces.pieces)


def _host_memory(num_bytes: int, is_shared: bool) -> np.ndarray:
    if not is_shared:
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    path = f"/dev/shm/gpu_candidates_{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.ftruncate(fd, num_bytes)
    memory = np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)
    os.close(fd)
    return memory


def contiguous(b: Bench) -> Run:
    """As many bytes as the call's blocks have, at once: the limit."""
    host, gpu = b.host.ctypes.data, b.flat_gpu.data_ptr()

    def run(to_slots: int) -> None:
        _copy(to_slots, gpu, host, b.n * SLOT_BYTES, b.stream)

    return run


def _copy(to_host: int, gpu: int, host: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    if not to_host:
        cuda_driver.copy_to_device_async(gpu, host, num_bytes, stream.cuda_stream)
        return
    arguments = c_void_p(host), c_uint64(gpu), c_size_t(num_bytes), c_void_p(stream.cuda_stream)
    cuda_driver.call("cuMemcpyDtoHAsync_v2", *arguments)


def load_kernel(b: Bench, load: str = "__ldcs", store: str = "__stcs") -> int:
    defines = {
        "VECTOR": "uint4",
        "UNROLL": str(cuda_kernel.UNROLL),
        "NUM_THREADS": str(cuda_kernel.NUM_THREADS),
        "LOAD": load,
        "STORE": store,
    }
    return cuda_driver.get_function(
        cuda_driver.load_module(compile_program(SOURCE, b.device, defines)), "move_blocks"
    )


def kernel(b: Bench, thread_blocks: int, load: str, store: str, layers: bool = False) -> Run:
    function = load_kernel(b, load, store)
    table, ends, num_pieces = b.tables(layers)
    done = torch.zeros(64, dtype=torch.int32, device="cuda")
    announced = torch.zeros(64, dtype=torch.int32).pin_memory()

    def run(to_slots: int) -> None:
        pointers = (done.data_ptr(), announced.data_ptr()) if layers else (0, 0)
        ids = b.blocks.data_ptr(), b.slots.data_ptr(), b.n
        sides = b.host.ctypes.data, SLOT_BYTES
        arguments = Arguments(table.data_ptr(), ends.data_ptr(), len(ends), to_slots, *ids, *sides, *pointers)
        count = min(thread_blocks, num_pieces * b.n)
        cuda_driver.launch(function, count, cuda_kernel.NUM_THREADS, b.stream.cuda_stream, arguments)

    return run


def rows(b: Bench, rows_per_command: int, num_streams: int = 1) -> Run:
    """Commands of so many segments; on two streams, each moves half of the blocks."""
    pieces = [(i // rows_per_command, b.gpu.data_ptr(), s) for i, s in enumerate(b.segments)]
    return _queued(b, RowPlan(rows_of(pieces), b.host.ctypes.data, SLOT_BYTES), num_streams)


def batch(b: Bench, num_threads: int = 1) -> Run:
    """Threads with a stream each queue a share of the blocks."""
    plan = BatchPlan([(b.gpu.data_ptr(), s) for s in b.segments], b.host.ctypes.data, SLOT_BYTES)
    if num_threads == 1:
        return _queued(b, plan, 1)
    threads = ThreadPoolExecutor(num_threads, initializer=b.device.activate)
    streams = [torch.cuda.Stream() for _ in range(num_threads)]

    def queue(to_slots: int, number: int) -> None:
        ends = [b.n * i // num_threads for i in range(num_threads + 1)]
        plan.enqueue(b.op(to_slots, ends[number], ends[number + 1]), streams[number].cuda_stream)

    def run(to_slots: int) -> None:
        for stream in streams:
            stream.wait_stream(b.stream)
        list(threads.map(functools.partial(queue, to_slots), range(num_threads)))
        for stream in streams:
            b.stream.wait_stream(stream)

    return run


def layered_batch(b: Bench) -> Run:
    """A batch for each layer."""
    plans = [
        BatchPlan([(b.gpu.data_ptr(), s) for s in b.segments[i : i + 2]], b.host.ctypes.data, SLOT_BYTES)
        for i in range(0, len(b.segments), 2)
    ]

    def run(to_slots: int) -> None:
        op = b.op(to_slots)
        for plan in plans:
            plan.enqueue(op, b.stream.cuda_stream)

    return run


def _queued(b: Bench, plan: RowPlan | BatchPlan, num_streams: int) -> Run:
    def run(to_slots: int) -> None:
        share = -(-b.n // num_streams)
        for number, stream in enumerate(b.streams[:num_streams]):
            if number:
                stream.wait_stream(b.stream)
            plan.enqueue(b.op(to_slots, number * share, (number + 1) * share), stream.cuda_stream)
        for stream in b.streams[1:num_streams]:
            b.stream.wait_stream(stream)

    return run


def triton(b: Bench, thread_blocks: int) -> Run:
    from benchmarks.gpu_triton_kernel import Pointer, move

    gpu = b.gpu.view(torch.int64).reshape(-1)
    host = Pointer(b.host.ctypes.data, torch.int64)
    shape = (NUM_LAYERS * KV_DIM, SEGMENT_BYTES // 8, NUM_BLOCKS, 4096)

    def run(to_slots: int) -> None:
        with torch.cuda.stream(b.stream):
            move[(thread_blocks,)](gpu, host, b.blocks, b.slots, b.n, to_slots, *shape, num_warps=16)

    return run


def staged(b: Bench, chunk_slots: int, ring: int) -> Run:
    """The copy engine between slots and a ring of GPU buffers, a kernel between these and the blocks."""
    function = load_kernel(b)
    table, ends, _ = b.tables(False)
    buffer = torch.empty(ring, chunk_slots, SLOT_BYTES, dtype=torch.uint8, device="cuda")
    places = torch.arange(chunk_slots, dtype=torch.int32, device="cuda")
    copying, moving = b.streams
    filled, emptied = ([torch.cuda.Event() for _ in range(ring)] for _ in range(2))

    def move(to_slots: int, first: int, count: int, r: int) -> None:
        ids = b.blocks.data_ptr() + 8 * first, places.data_ptr(), count
        sides = buffer[r].data_ptr(), SLOT_BYTES
        arguments = Arguments(table.data_ptr(), ends.data_ptr(), 1, to_slots, *ids, *sides, 0, 0)
        cuda_driver.launch(function, 32, cuda_kernel.NUM_THREADS, moving.cuda_stream, arguments)

    def copy(to_slots: int, first: int, count: int, r: int) -> None:
        for k, slot in enumerate(b.slot_ids[first : first + count].tolist()):
            gpu = buffer[r].data_ptr() + k * SLOT_BYTES
            _copy(to_slots, gpu, b.host.ctypes.data + slot * SLOT_BYTES, SLOT_BYTES, copying)

    def run(to_slots: int) -> None:
        moving.wait_stream(copying)
        steps = [(moving, move), (copying, copy)] if to_slots else [(copying, copy), (moving, move)]
        for number, first in enumerate(range(0, b.n, chunk_slots)):
            r, count = number % ring, min(chunk_slots, b.n - first)
            for (stream, step), wait, done in zip(steps, (emptied, filled), (filled, emptied), strict=True):
                if wait is filled or number >= ring:
                    stream.wait_event(wait[r])
                step(to_slots, first, count, r)
                done[r].record(stream)
        copying.wait_stream(moving)

    return run


def candidates(b: Bench) -> dict[str, Callable[[], Run]]:
    """By name, what makes each."""
    bind = functools.partial
    return {
        "contiguous": bind(contiguous, b),
        "kernel, 4 thread blocks": bind(kernel, b, 4, "__ldcs", "__stcs"),
        "kernel, 16 thread blocks": bind(kernel, b, 16, "__ldcs", "__stcs"),
        "kernel, 16 thread blocks, ld.cg/st.cg": bind(kernel, b, 16, "__ldcg", "__stcg"),
        "kernel, layer by layer": bind(kernel, b, 16, "__ldcs", "__stcs", layers=True),
        "rows, 72 a command": bind(rows, b, 72),
        "rows, 72 a command, 2 streams": bind(rows, b, 72, 2),
        "rows, 8 a command": bind(rows, b, 8),
        "rows, 2 a command": bind(rows, b, 2),
        "batch": bind(batch, b),
        "batch, 2 threads": bind(batch, b, 2),
        "batch, 3 threads": bind(batch, b, 3),
        "batch for each layer": bind(layered_batch, b),
        "staged, 8 buffers of 4 slots": bind(staged, b, 4, 8),
        "triton, 16 thread blocks": bind(triton, b, 16),
    }
