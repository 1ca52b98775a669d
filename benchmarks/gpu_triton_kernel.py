"""The Triton candidate of gpu_kernels.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def move(gpu, host, blocks, slots, n, to_slots: tl.constexpr, num_pieces: tl.constexpr, segment: tl.constexpr,
         num_blocks: tl.constexpr, tile: tl.constexpr):  # fmt: skip
    """Segments of `segment` int64 each, tile by tile."""
    per_segment = segment // tile
    total = n * num_pieces * per_segment
    for turn in range(tl.program_id(0), total, tl.num_programs(0)):
        i = turn // (num_pieces * per_segment)
        rest = turn % (num_pieces * per_segment)
        s = (rest // per_segment).to(tl.int64)
        offset = (rest % per_segment) * tile + tl.arange(0, tile)
        engine = gpu + (s * num_blocks + tl.load(blocks + i)) * segment + offset
        slot = host + (tl.load(slots + i).to(tl.int64) * num_pieces + s) * segment + offset
        if to_slots:
            tl.store(slot, tl.load(engine, cache_modifier=".cg"), cache_modifier=".cs")
        else:
            tl.store(engine, tl.load(slot, cache_modifier=".cg"), cache_modifier=".cs")


class Pointer:
    """What Triton takes for a pointer to host memory."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address
