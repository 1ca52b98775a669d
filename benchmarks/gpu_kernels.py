"""Which kernel should move blocks between GPU and pinned host memory?  Compares candidates on one GPU.

    python -m benchmarks.gpu_kernels

All move the same blocks (2.25 MiB slots of 72 segments of 32 KiB) in random order, are checked byte for
byte, and are given as GB/s and as a ratio to a contiguous copy of the same bytes in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import mmap
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from ctypes import c_uint32, c_uint64

import numpy as np
import torch

from flexkv_radix.transfer import cuda_driver
from flexkv_radix.transfer.cuda_compiler import compile_program
from flexkv_radix.transfer.cuda_driver import Device
from flexkv_radix.transfer.cuda_kernel import SOURCE, Arguments, cut
from flexkv_radix.transfer.cuda_rows import RowPlan, rows_of
from flexkv_radix.transfer.protocol import OpKind, TransferOp
from flexkv_radix.transfer.segments import Segment
from radixshmem.geometry import ComponentType

NUM_LAYERS, KV_DIM, SEGMENT_BYTES, NUM_BLOCKS = 36, 2, 32 << 10, 768
SLOT_BYTES = NUM_LAYERS * KV_DIM * SEGMENT_BYTES

BULK_SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef struct { u64 engine, block_stride, slot_offset, num_bytes; } piece;

static __device__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

static __device__ void wait(u64 *bar, u32 parity)
{
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
}

extern "C" __global__ void __launch_bounds__(32)
bulk_move(const piece *pieces, u32 num_pieces, u32 to_slots, const long long *blocks, const int *slots, u64 n,
          u64 pool, u64 slot_stride)
{
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ u64 bars[STAGES];
    if (threadIdx.x != 0)
        return;
    for (int s = 0; s < STAGES; s++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&bars[s])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    u64 all = n * num_pieces, turn = blockIdx.x, ahead = blockIdx.x;
    u64 loaded = 0, stored = 0;
    for (; turn < all; turn += gridDim.x, stored++) {
        for (; ahead < all && loaded < stored + STAGES - 1; ahead += gridDim.x, loaded++) {
            piece p = pieces[ahead % num_pieces];
            u64 i = ahead / num_pieces, s = loaded % STAGES;
            u64 engine = p.engine + (u64)blocks[i] * p.block_stride;
            u64 host = pool + (u64)slots[i] * slot_stride + p.slot_offset;
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         :: "r"(shared_address(&bars[s])), "r"((u32)p.num_bytes) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                         " [%0], [%1], %2, [%3];"
                         :: "r"(shared_address(ring + s * STAGE_BYTES)), "l"(to_slots ? engine : host),
                            "r"((u32)p.num_bytes), "r"(shared_address(&bars[s])) : "memory");
        }
        piece p = pieces[turn % num_pieces];
        u64 i = turn / num_pieces, s = stored % STAGES;
        u64 engine = p.engine + (u64)blocks[i] * p.block_stride;
        u64 host = pool + (u64)slots[i] * slot_stride + p.slot_offset;
        wait(&bars[s], (u32)(stored / STAGES) & 1);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(to_slots ? host : engine), "r"(shared_address(ring + s * STAGE_BYTES)),
                        "r"((u32)p.num_bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


class BulkArguments(ctypes.Structure):
    _fields_ = [
        ("pieces", c_uint64), ("num_pieces", c_uint32), ("to_slots", c_uint32), ("blocks", c_uint64),
        ("slots", c_uint64), ("n", c_uint64), ("pool", c_uint64), ("slot_stride", c_uint64),
    ]  # fmt: skip


class Bench:
    """Memory of both sides, and the ids of one call."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.gpu = torch.empty(
            NUM_LAYERS * KV_DIM, NUM_BLOCKS, SEGMENT_BYTES, dtype=torch.uint8, device="cuda"
        )
        self.map = mmap.mmap(-1, NUM_BLOCKS * SLOT_BYTES)
        self.host = np.frombuffer(self.map, dtype=np.uint8).reshape(NUM_BLOCKS, SLOT_BYTES)
        self.host[:] = 1
        self.device = Device.at(0)
        self.device.activate()
        cuda_driver.host_register(self.host.ctypes.data, self.host.nbytes)
        self.host_tensor = torch.from_numpy(self.host)
        self.stream = torch.cuda.Stream()
        self.flat_gpu = torch.empty(256 * SLOT_BYTES, dtype=torch.uint8, device="cuda")
        segments = [
            Segment(
                i // KV_DIM,
                0,
                i * NUM_BLOCKS * SEGMENT_BYTES,
                SEGMENT_BYTES,
                SEGMENT_BYTES,
                i * SEGMENT_BYTES,
            )
            for i in range(NUM_LAYERS * KV_DIM)
        ]
        self.segments = segments

    def set_ids(self, n: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n = n
        self.block_ids, self.slot_ids = rng.permutation(NUM_BLOCKS)[:n], rng.permutation(NUM_BLOCKS)[:n]
        self.blocks = torch.from_numpy(self.block_ids.astype(np.int64)).cuda()
        self.slots = torch.from_numpy(self.slot_ids.astype(np.int32)).cuda()
        torch.cuda.synchronize()

    def tables(self, layers: bool, piece_bytes: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        import flexkv_radix.transfer.cuda_kernel as module

        saved, module.PIECE_BYTES = module.PIECE_BYTES, piece_bytes
        address = self.gpu.data_ptr()
        groups = [self.segments[i : i + KV_DIM] for i in range(0, len(self.segments), KV_DIM)]
        pieces = cut([[(address, s) for s in g] for g in (groups if layers else [self.segments])])
        module.PIECE_BYTES = saved
        table = torch.from_numpy(pieces.pieces.view(np.uint8).copy()).cuda()
        return table, torch.from_numpy(pieces.group_end.view(np.int32).copy()).cuda(), len(pieces.pieces)

    def scramble(self) -> None:
        self.gpu.random_(0, 256)
        torch.cuda.synchronize()

    def check(self, run: Callable[[int], None], name: str) -> None:
        """One store and one load against what torch's indexing says."""
        self.scramble()
        run(1)
        torch.cuda.synchronize()
        expected = self.gpu[:, self.blocks].transpose(0, 1).reshape(self.n, SLOT_BYTES).cpu()
        assert torch.equal(self.host_tensor[torch.from_numpy(self.slot_ids)], expected), f"{name}: store"
        self.gpu.zero_()
        torch.cuda.synchronize()
        run(0)
        torch.cuda.synchronize()
        loaded = self.gpu[:, self.blocks].transpose(0, 1).reshape(self.n, SLOT_BYTES).cpu()
        assert torch.equal(loaded, expected), f"{name}: load"

    def seconds(self, work: Callable[[], None], repeats: int) -> float:
        """Median time of work on self.stream."""
        times = []
        for _ in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(self.stream)
            work()
            end.record(self.stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])


def vector_kernel(
    b: Bench, blocks: int, threads: int, unroll: int, load: str, store: str, layers: bool = False
) -> Callable[[int], None]:
    defines = {
        "VECTOR": "uint4",
        "UNROLL": str(unroll),
        "NUM_THREADS": str(threads),
        "LOAD": load,
        "STORE": store,
    }
    module = cuda_driver.load_module(compile_program(SOURCE, b.device, defines))
    function = cuda_driver.get_function(module, "move_blocks")
    table, ends, num_pieces = b.tables(layers, threads * unroll * 16)
    done = torch.zeros(64, dtype=torch.int32, device="cuda")
    flags = torch.zeros(64, dtype=torch.int32).pin_memory()

    def run(to_slots: int) -> None:
        arguments = Arguments(
            table.data_ptr(), ends.data_ptr(), len(ends), to_slots, b.blocks.data_ptr(), b.slots.data_ptr(),
            b.n, b.host.ctypes.data, SLOT_BYTES, done.data_ptr() if layers else 0,
            flags.data_ptr() if layers else 0,
        )  # fmt: skip
        cuda_driver.launch(function, min(blocks, num_pieces * b.n), threads, b.stream.cuda_stream, arguments)

    return run


def bulk_kernel(b: Bench, blocks: int, stages: int, stage_bytes: int) -> Callable[[int], None]:
    defines = {"STAGES": str(stages), "STAGE_BYTES": str(stage_bytes)}
    module = cuda_driver.load_module(compile_program(BULK_SOURCE, b.device, defines))
    function = cuda_driver.get_function(module, "bulk_move")
    shared = stages * stage_bytes
    cuda_driver.call("cuFuncSetAttribute", ctypes.c_void_p(function), 8, shared)
    table, _, num_pieces = b.tables(False, stage_bytes)

    def run(to_slots: int) -> None:
        a = BulkArguments(
            table.data_ptr(), num_pieces, to_slots, b.blocks.data_ptr(), b.slots.data_ptr(), b.n,
            b.host.ctypes.data, SLOT_BYTES,
        )  # fmt: skip
        base = ctypes.addressof(a)
        pointers = (ctypes.c_void_p * 8)(*(base + getattr(BulkArguments, f[0]).offset for f in a._fields_))
        cuda_driver.call(
            "cuLaunchKernel", ctypes.c_void_p(function), blocks, 1, 1, 32, 1, 1, shared,
            ctypes.c_void_p(b.stream.cuda_stream), pointers, None,
        )  # fmt: skip

    return run


def triton_kernel(b: Bench, blocks: int, warps: int, tile: int) -> Callable[[int], None]:
    from benchmarks.gpu_triton_kernel import Pointer, move

    gpu = b.gpu.view(torch.int64).reshape(-1)
    host = Pointer(b.host.ctypes.data, torch.int64)
    shape = (NUM_LAYERS * KV_DIM, SEGMENT_BYTES // 8, NUM_BLOCKS, tile)

    def run(to_slots: int) -> None:
        with torch.cuda.stream(b.stream):
            move[(blocks,)](gpu, host, b.blocks, b.slots, b.n, to_slots, *shape, num_warps=warps)

    return run


def staged(b: Bench, chunk_slots: int, ring: int, blocks: int) -> Callable[[int], None]:
    """Copy engine between slots and a ring of GPU buffers, a kernel between these and the blocks."""
    defines = {"VECTOR": "uint4", "UNROLL": "4", "NUM_THREADS": "512", "LOAD": "__ldcs", "STORE": "__stcs"}
    module = cuda_driver.load_module(compile_program(SOURCE, b.device, defines))
    function = cuda_driver.get_function(module, "move_blocks")
    table, ends, _ = b.tables(False, 32 << 10)
    buffer = torch.empty(ring, chunk_slots, SLOT_BYTES, dtype=torch.uint8, device="cuda")
    places = torch.arange(chunk_slots, dtype=torch.int32, device="cuda")
    other = torch.cuda.Stream()
    filled = [torch.cuda.Event() for _ in range(ring)]
    emptied = [torch.cuda.Event() for _ in range(ring)]
    host = b.host.ctypes.data

    def move(to_slots: int, first: int, count: int, r: int, stream: int) -> None:
        arguments = Arguments(
            table.data_ptr(), ends.data_ptr(), 1, to_slots, b.blocks.data_ptr() + 8 * first,
            places.data_ptr(), count,
            buffer[r].data_ptr(), SLOT_BYTES, 0, 0,
        )  # fmt: skip
        cuda_driver.launch(function, blocks, 512, stream, arguments)

    def run(to_slots: int) -> None:
        slot_ids = b.slot_ids.tolist()
        copy, compute = (b.stream, other)
        compute.wait_stream(copy)
        for number, first in enumerate(range(0, b.n, chunk_slots)):
            r, count = number % ring, min(chunk_slots, b.n - first)
            base = buffer[r].data_ptr()
            if to_slots:
                if number >= ring:
                    compute.wait_event(emptied[r])
                move(1, first, count, r, compute.cuda_stream)
                filled[r].record(compute)
                copy.wait_event(filled[r])
                for k in range(count):
                    cuda_driver.call(
                        "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host + slot_ids[first + k] * SLOT_BYTES),
                        c_uint64(base + k * SLOT_BYTES), ctypes.c_size_t(SLOT_BYTES),
                        ctypes.c_void_p(copy.cuda_stream),
                    )  # fmt: skip
                emptied[r].record(copy)
            else:
                if number >= ring:
                    copy.wait_event(emptied[r])
                for k in range(count):
                    cuda_driver.copy_to_device_async(
                        base + k * SLOT_BYTES,
                        host + slot_ids[first + k] * SLOT_BYTES,
                        SLOT_BYTES,
                        copy.cuda_stream,
                    )
                filled[r].record(copy)
                compute.wait_event(filled[r])
                move(0, first, count, r, compute.cuda_stream)
                emptied[r].record(compute)
        copy.wait_stream(compute)

    return run


def contiguous(b: Bench) -> Callable[[int], None]:
    flat = b.host_tensor.reshape(-1)

    def run(to_slots: int) -> None:
        num_bytes = b.n * SLOT_BYTES
        with torch.cuda.stream(b.stream):
            function, host, gpu = "cuMemcpyDtoHAsync_v2", flat.data_ptr(), b.flat_gpu.data_ptr()
            if to_slots:
                cuda_driver.call(function, ctypes.c_void_p(host), c_uint64(gpu), ctypes.c_size_t(num_bytes),
                                 ctypes.c_void_p(b.stream.cuda_stream))  # fmt: skip
            else:
                cuda_driver.copy_to_device_async(gpu, host, num_bytes, b.stream.cuda_stream)

    return run


def copy_engine(b: Bench, segments_per_command: int) -> Callable[[int], None]:
    """Commands of so many segments (rows) per block, as cuda_rows.py queues them."""
    groups = range(0, len(b.segments), segments_per_command)
    pieces = [
        (group, b.gpu.data_ptr(), s)
        for group, first in enumerate(groups)
        for s in b.segments[first : first + segments_per_command]
    ]
    plan = RowPlan(rows_of(pieces), b.host.ctypes.data, SLOT_BYTES)

    def run(to_slots: int) -> None:
        kind = OpKind.D2H if to_slots else OpKind.H2D
        op = TransferOp(0, kind, ComponentType.FULL, b.block_ids, b.slot_ids.astype(np.int32))
        plan.enqueue(op, b.stream.cuda_stream)

    return run


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access in stream order, no hints."""

    _fields_ = [("order", c_uint32), ("hints", c_uint32 * 4), ("flags", c_uint32)]


def batch(b: Bench, segments_per_copy: int) -> Callable[[int], None]:
    """cuMemcpyBatchAsync of all segments; segments_per_copy > 1 as if they were neighbours on the GPU."""
    num_bytes = segments_per_copy * SEGMENT_BYTES
    starts = np.array([s.base_bytes for s in b.segments[::segments_per_copy]], dtype=np.uint64)
    offsets = np.arange(0, SLOT_BYTES, num_bytes, dtype=np.uint64)
    attributes, zero = _Attributes(order=1), ctypes.c_size_t(0)

    def run(to_slots: int) -> None:
        gpu = b.gpu.data_ptr() + starts[None, :] + (b.block_ids.astype(np.uint64) * SEGMENT_BYTES)[:, None]
        host = b.host.ctypes.data + (b.slot_ids.astype(np.uint64) * SLOT_BYTES)[:, None] + offsets[None, :]
        gpu, host = np.ascontiguousarray(gpu).reshape(-1), np.ascontiguousarray(host).reshape(-1)
        sizes = np.full(len(gpu), num_bytes, dtype=np.uint64)
        to, source = (host, gpu) if to_slots else (gpu, host)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (to, source, sizes)]
        cuda_driver.call(
            "cuMemcpyBatchAsync_v2", *pointers, ctypes.c_size_t(len(gpu)), ctypes.byref(attributes),
            ctypes.byref(zero), ctypes.c_size_t(1), ctypes.c_void_p(b.stream.cuda_stream),
        )  # fmt: skip

    return run


def candidates(b: Bench) -> dict[str, Callable[[], Callable[[int], None]]]:
    makers: dict[str, Callable[[], Callable[[int], None]]] = {}
    for blocks, load, store in ((4, "__ldcs", "__stcs"), (16, "__ldcs", "__stcs"), (4, "__ldcg", "__stcg"),
                                (8, "__ldcg", "__stcg"), (16, "__ldcg", "__stcg")):  # fmt: skip
        makers[f"kernel b{blocks} {load}/{store}"] = functools.partial(
            vector_kernel, b, blocks, 512, 4, load, store
        )
    makers["kernel b16 layer by layer"] = functools.partial(
        vector_kernel, b, 16, 512, 4, "__ldcg", "__stcg", layers=True
    )
    for rows in (72, 8, 2, 1):
        makers[f"copy engine, commands of {rows} x 32 KiB"] = functools.partial(copy_engine, b, rows)
    makers["batch of 32 KiB"] = functools.partial(batch, b, 1)
    for chunk, ring in ((2, 4), (4, 8), (8, 4)):
        makers[f"staged, ring of {ring} x {chunk} slots"] = functools.partial(staged, b, chunk, ring, 32)
    makers["triton b16"] = functools.partial(triton_kernel, b, 16, 16, 4096)
    makers["bulk copies b4"] = functools.partial(bulk_kernel, b, 4, 6, 32 << 10)
    return makers


def loop(b: Bench, name: str, to_slots: int, seconds: float) -> None:
    """Run a candidate for a while, two calls of 64 blocks queued at a time; prints GB/s."""
    b.set_ids(64, 3)
    makers = {"contiguous": lambda: contiguous(b), **candidates(b)}
    run = makers[name]()
    run(to_slots)
    torch.cuda.synchronize()
    print("ready", flush=True)
    begin, calls, ends = time.perf_counter(), 0, [torch.cuda.Event(), torch.cuda.Event()]
    while time.perf_counter() - begin < seconds:
        if calls >= 2:
            ends[calls % 2].synchronize()
        run(to_slots)
        ends[calls % 2].record(b.stream)
        calls += 1
    torch.cuda.synchronize()
    print(calls * 64 * SLOT_BYTES / (time.perf_counter() - begin) / 1e9, flush=True)


def matmuls_per_s(seconds: float) -> float:
    """bf16 products of 4096 x 4096 matrices a second: the engine's own work."""
    a, c = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(10):
        torch.matmul(a, c, out=out)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(20):
            torch.matmul(a, c, out=out)
        torch.cuda.synchronize()
        count += 20
    return count / (time.perf_counter() - begin)


def interference(names: list[str]) -> None:
    """What a transfer in another process does to an engine's matrix products, and they to it."""
    alone = matmuls_per_s(1.5)
    print(f"\n{'beside matrix products of another process':<44}{'GB/s':>8}{'products left':>16}")
    for name in names:
        for to_slots in (1, 0):
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu_kernels",
                "--loop",
                name,
                "--to-slots",
                str(to_slots),
            ]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            if child.stdout.readline().strip() != "ready":
                print(f"{name}: did not run", flush=True)
                continue
            rate = matmuls_per_s(1.5)
            gbps = float(child.stdout.readline())
            child.wait()
            print(
                f"{name + (' D2H' if to_slots else ' H2D'):<44}{gbps:>8.1f}{rate / alone:>15.0%}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--loop")
    parser.add_argument("--to-slots", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.loop:
        loop(Bench(), arguments.loop, arguments.to_slots, 2.5)
        return
    if arguments.compare:
        compare()
        return
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_kernels", "--compare"], check=False
    )  # apart: a candidate that fails may take the CUDA context with it
    beside = ["kernel b16 __ldcg/__stcg", "copy engine, commands of 72 x 32 KiB"]
    beside += ["copy engine, commands of 2 x 32 KiB", "batch of 32 KiB", "staged, ring of 8 x 4 slots"]
    interference(["contiguous", *beside, "staged, ring of 4 x 8 slots"])


def compare() -> None:
    b = Bench()
    rows = []
    sizes = (16, 64, 256)
    for name, make in {"contiguous": lambda: contiguous(b), **candidates(b)}.items():
        try:
            b.set_ids(64, 1)
            run = make()
            if name != "contiguous":
                b.check(run, name)
        except Exception as error:  # noqa: BLE001 - a candidate that does not run is a result
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        gbps = {}
        for n in sizes:
            b.set_ids(n, 2)
            for to_slots in (1, 0):
                seconds = b.seconds(functools.partial(run, to_slots), 12 if n < 256 else 6)
                gbps[n, to_slots] = n * SLOT_BYTES / seconds / 1e9
        rows.append((name, gbps))
        print("measured", name, flush=True)
    base = rows[0][1]
    print(
        f"\n{'GB/s (ratio to contiguous)':<44}"
        + "".join(f"{d} {n:<10}" for d in ("D2H", "H2D") for n in sizes)
    )
    for name, gbps in rows:
        cells = [f"{gbps[n, d]:5.1f} ({gbps[n, d] / base[n, d]:.3f})" for d in (1, 0) for n in sizes]
        print(f"{name:<44}" + " ".join(cells))


if __name__ == "__main__":
    main()
