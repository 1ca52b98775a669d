"""The CUDA kernel's own source, compiled for the CPU: one thread per block, blocks in any order."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
from shared_engine import EnginePart, scramble
from test_round_trip import PARTS

from flexkv_radix.transfer.cuda_kernel import PIECE, PIECE_BYTES, SOURCE, Arguments, cut
from flexkv_radix.transfer.segments import by_layer, coalesce

_CPU = r"""
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#define UNROLL 4
typedef struct { unsigned int x, y, z, w; } __attribute__((may_alias)) uint4;
static struct { unsigned int x; } threadIdx, blockIdx, blockDim = {1}, gridDim;
static void __syncthreads(void) {}
static void __threadfence(void) {}
static void __threadfence_system(void) {}
static unsigned int atomicAdd(unsigned int *at, unsigned int v) { *at += v; return *at - v; }
"""
_RUN = r"""
void run(unsigned int grid, unsigned int block, const piece *pieces, const u32 *group_end, u32 num_groups,
         u32 to_slots, const long long *blocks, const int *slots, u64 n, u64 pool, u64 slot_stride, u32 *done,
         volatile u32 *announced)
{
    gridDim.x = grid;
    blockIdx.x = block;
    move_blocks(pieces, group_end, num_groups, to_slots, blocks, slots, n, pool, slot_stride, done,
                announced);
}
"""
NUM_SLOTS = 29


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    """The kernel by width of access, in bytes."""
    libraries = {}
    for width, vector in ((16, "uint4"), (1, "unsigned char")):
        directory = tmp_path_factory.mktemp("kernel")
        source = directory / "kernel.c"
        source.write_text(_CPU + f"#define VECTOR {vector}\n" + SOURCE.replace('extern "C"', "") + _RUN)
        library = directory / "kernel.so"
        flags = ["-shared", "-fPIC", "-O1", "-fno-strict-aliasing", "-w"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        libraries[width] = ctypes.CDLL(str(library))
    return libraries


class Moved:
    """One plan and its ids, run by num_blocks thread blocks in a random order."""

    def __init__(self, part: EnginePart, *, layers: bool, stride: int, rng: np.random.Generator) -> None:
        segments = part.rank_part(0).segments
        groups = by_layer(segments) if layers else [coalesce(segments)]
        self.plan = cut([[(part.tensors[s.tensor].ctypes.data, s) for s in group] for group in groups])
        self.memory = np.zeros((NUM_SLOTS + 1) * stride, dtype=np.uint8)
        start = -self.memory.ctypes.data % 16
        self.slots = self.memory[start : start + NUM_SLOTS * stride].reshape(NUM_SLOTS, stride)
        self.done = np.zeros(self.plan.num_groups, dtype=np.uint32)
        self.announced = np.zeros(self.plan.num_groups, dtype=np.uint32)
        self.rng = rng

    def run(
        self, library: ctypes.CDLL, to_slots: int, blocks: np.ndarray, slots: np.ndarray, grid: int
    ) -> None:
        blocks, slots = blocks.astype(np.int64), slots.astype(np.int32)
        self.announced[:] = 0
        values = (
            self.plan.pieces.ctypes.data, self.plan.group_end.ctypes.data, self.plan.num_groups, to_slots,
            blocks.ctypes.data, slots.ctypes.data, len(blocks), self.slots.ctypes.data, self.slots.shape[1],
            self.done.ctypes.data, self.announced.ctypes.data,
        )  # fmt: skip
        types = [kind for _, kind in Arguments._fields_]
        grid = min(grid, len(self.plan.pieces) * len(blocks))  # as launched: every thread block has work
        for block in self.rng.permutation(grid):
            assert not self.announced.all(), "announced before everybody was done"
            arguments = [kind(value) for kind, value in zip(types, values, strict=True)]
            library.run(ctypes.c_uint32(grid), ctypes.c_uint32(block), *arguments)


@pytest.mark.parametrize("layers", [False, True], ids=["whole", "layers"])
@pytest.mark.parametrize("name", PARTS)
def test_the_kernel_moves_what_the_plan_says(
    name: str, layers: bool, library: dict[int, ctypes.CDLL]
) -> None:
    part = PARTS[name]()
    rng = np.random.default_rng(13)
    moved = Moved(part, layers=layers, stride=part.share_bytes + 16, rng=rng)
    width = 16 if moved.plan.vector_bytes(moved.slots.ctypes.data, moved.slots.shape[1]) == 16 else 1
    for grid in (1, 3, 16):
        scramble(rng, moved.slots, *part.tensors)
        blocks, ids = rng.permutation(part.num_blocks)[:5], rng.permutation(NUM_SLOTS)[:5]
        expected = moved.slots.copy()
        expected[ids, : part.share_bytes] = part.blocks()[blocks]
        moved.run(library[width], 1, blocks, ids, grid)
        assert np.array_equal(moved.slots, expected)
        assert moved.announced.all()
        assert not moved.done.any(), "counters are left at 0 for the next launch"

        expected_blocks = part.blocks()
        expected_blocks[blocks] = moved.slots[ids[::-1], : part.share_bytes]
        moved.run(library[width], 0, blocks, ids[::-1], grid)
        assert np.array_equal(part.blocks(), expected_blocks)


def test_pieces_are_cut_to_what_a_round_moves() -> None:
    part = PARTS["blockfirst"]()
    segments = coalesce(part.rank_part(0).segments)
    big = [type(segments[0])(0, 0, 64, 10 * PIECE_BYTES, 2 * PIECE_BYTES + 48, 32)]
    plan = cut([[(4096, big[0])]])
    assert plan.pieces.dtype == PIECE
    assert plan.pieces["num_bytes"].tolist() == [PIECE_BYTES, PIECE_BYTES, 48]
    assert plan.pieces["engine"].tolist() == [4160 + i * PIECE_BYTES for i in range(3)]
    assert plan.pieces["slot_offset"].tolist() == [32 + i * PIECE_BYTES for i in range(3)]


@pytest.mark.parametrize(
    ("pool", "stride", "expected"), [(4096, 4096, 16), (4096, 4104, 8), (4098, 4096, 2), (4097, 4096, 1)]
)
def test_accesses_are_as_wide_as_the_addresses_allow(pool: int, stride: int, expected: int) -> None:
    segment = PARTS["opaque-interleaved"]().rank_part(0).segments[0]
    assert cut([[(1 << 20, segment)]]).vector_bytes(pool, stride) == expected
