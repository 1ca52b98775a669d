"""How each rank's part of a component is moved.

A kernel of another process does not run beside the engine's kernels: the GPU switches between the two
processes, and while a kernel waits for the bus the engine stands still.  Measured on an H200 with
2.25 MiB slots, beside matrix products of another process (GB/s of 55; products left):

    copy engine, rows      50    99 %      all layers in one tensor: one command for a block
    copy engine, batch     46    99 %      72 copies of 32 KiB for a block
    kernel                 35    49 %

A command of rows has a fixed cost of about 2.6 us, 140 KiB of the bus; a copy of a batch about 0.1 us.
So rows are used where commands are long, a batch where at least segments are, and a kernel for the rest.

Queuing a copy of a batch takes a core 0.45 us, or 0.8 us beside a busy sibling, while the bus moves its
32 KiB in 0.6 us: one thread may be too slow, so several queue a batch, each on a stream of its own.
A stage of a layerwise load ends with a pause of the bus of about 2 us: a few blocks' layers share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from flexkv_radix.transfer.cuda_batch import BatchPlan, batch_function
from flexkv_radix.transfer.cuda_kernel import KernelPlan, cut
from flexkv_radix.transfer.cuda_memory import CudaRankMemory
from flexkv_radix.transfer.cuda_rows import RowPlan, rows_of
from flexkv_radix.transfer.mover import PlacedPart, Placement
from flexkv_radix.transfer.protocol import CudaPath, OpKind, RankPlace, TransferOp
from flexkv_radix.transfer.segments import Segment, by_layer, coalesce
from radixshmem.geometry import ComponentType

MIN_COMMAND_BYTES = 1 << 20
MIN_COPY_BYTES = 16 << 10
MIN_STAGE_BYTES = 4 << 20  # 76 us of a bus of 55 GB/s: what a layer waits for those that share its stage
DEFAULT_QUEUE_THREADS = 2
MIN_COPIES_A_LANE = 128


@dataclass(frozen=True)
class RankPlan:
    """The work for one rank: a kernel that moves groups of segments in order, or the copy engine's stages."""

    memory: CudaRankMemory
    place: RankPlace
    layers: Sequence[Sequence[int]]  # that are in place after each group or stage
    work: KernelPlan | Sequence[RowPlan] | Sequence[BatchPlan]
    copies_a_block: int = 0  # 0: queuing takes so little that one thread does it

    def num_lanes(self, num_blocks: int, queue_threads: int) -> int:
        """Streams among which to share num_blocks."""
        most = min(queue_threads, num_blocks, num_blocks * self.copies_a_block // MIN_COPIES_A_LANE)
        return max(1, most)


class Plans:
    """Plans of all ranks for stores, loads and layerwise loads of one component."""

    def __init__(
        self, placement: Placement, component: ComponentType, thread_blocks: int, path: CudaPath
    ) -> None:
        self._slots = placement.store.pool_address(component), placement.store.pool(component).stride_bytes
        self._thread_blocks = thread_blocks
        self._path = path
        parts = placement.parts[component]
        self._loads = [self._plan(placed, [coalesce(placed.part.segments)]) for placed in parts]
        self._stores = [plan for plan, placed in zip(self._loads, parts, strict=True) if placed.part.stores]
        self._layers = [by_layer(placed.part.segments) for placed in parts]
        self._parts = parts
        self._layer_loads: dict[tuple[int, int], RankPlan] = {}  # by rank and layers a stage
        for rank in range(len(parts)):
            self._layer_load(rank, 1)

    def of(self, op: TransferOp) -> Sequence[RankPlan]:
        if op.kind is OpKind.D2H:
            return self._stores
        if not op.layerwise:
            return self._loads
        return [
            self._layer_load(rank, self._layers_a_stage(rank, len(op.slots)))
            for rank in range(len(self._parts))
        ]

    def _layers_a_stage(self, rank: int, num_blocks: int) -> int:
        """A power of two, so that there are few plans."""
        num_layers = len(self._layers[rank])
        if isinstance(self._layer_loads[rank, 1].work, KernelPlan):
            return 1  # a kernel does not stop between layers
        layer_bytes = max(1, num_blocks * self._parts[rank].part.share_bytes // num_layers)
        return min(1 << (-(-MIN_STAGE_BYTES // layer_bytes) - 1).bit_length(), num_layers)

    def _layer_load(self, rank: int, layers_a_stage: int) -> RankPlan:
        plan = self._layer_loads.get((rank, layers_a_stage))
        if plan is None:
            layers = self._layers[rank]
            groups = [
                list(chain.from_iterable(layers[first : first + layers_a_stage]))
                for first in range(0, len(layers), layers_a_stage)
            ]
            plan = self._plan(self._parts[rank], groups)
            self._layer_loads[rank, layers_a_stage] = plan
        return plan

    def close(self) -> None:
        for plan in (*self._loads, *self._layer_loads.values()):
            if isinstance(plan.work, KernelPlan):
                plan.work.close()

    def _plan(self, placed: PlacedPart, groups: Sequence[Sequence[Segment]]) -> RankPlan:
        """groups: segments that arrive together, in order."""
        memory, part = placed.memory, placed.part
        assert isinstance(memory, CudaRankMemory)
        pieces = [[(memory.tensor_address(part, s.tensor), s) for s in group] for group in groups]
        rows = [
            rows_of([(memory.allocation(part, s.tensor), address, s) for address, s in group])
            for group in pieces
        ]
        path = self._choose(
            part.share_bytes, num_commands=sum(map(len, rows)), num_copies=sum(map(len, groups))
        )
        layers = [list(dict.fromkeys(s.layer for s in group)) for group in groups]
        if path is CudaPath.ROWS:
            return RankPlan(memory, placed.place, layers, [RowPlan(group, *self._slots) for group in rows])
        if path is CudaPath.BATCH:
            batches = [BatchPlan(group, *self._slots) for group in pieces]
            return RankPlan(memory, placed.place, layers, batches, sum(map(len, groups)))
        memory.device.activate()
        kernel = KernelPlan(memory.device, cut(pieces), *self._slots, self._thread_blocks)
        return RankPlan(memory, placed.place, layers, kernel)

    def _choose(self, share_bytes: int, *, num_commands: int, num_copies: int) -> CudaPath:
        if self._path is not CudaPath.AUTO:
            return self._path
        if share_bytes >= num_commands * MIN_COMMAND_BYTES:
            return CudaPath.ROWS
        if share_bytes >= num_copies * MIN_COPY_BYTES and batch_function()[0]:
            return CudaPath.BATCH
        return CudaPath.KERNEL
