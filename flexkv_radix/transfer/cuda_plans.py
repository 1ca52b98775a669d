"""How each rank's part of a component is moved.

A kernel of another process does not run beside the engine's kernels: the GPU switches between the two
processes, and while a kernel waits for the bus the engine stands still.  Measured on an H200 with
2.25 MiB slots, beside matrix products of another process (GB/s of 55; products left):

    copy engine, rows      50    99 %      all layers in one tensor: one command for a block
    copy engine, batch     46    99 %      72 copies of 32 KiB for a block
    kernel                 35    49 %

A command of rows has a fixed cost of about 2.4 us, 130 KiB of the bus; a copy of a batch about 0.1 us.
So rows are used where commands are long, a batch where at least segments are, and a kernel for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Stage:
    """What is queued together for the copy engine, and the layers that are in place after it."""

    work: RowPlan | BatchPlan
    layers: Sequence[int]


@dataclass(frozen=True)
class RankPlan:
    """The work for one rank: a kernel whose groups are the layers, or stages for the copy engine."""

    memory: CudaRankMemory
    place: RankPlace
    layers: Sequence[int]
    work: KernelPlan | Sequence[Stage]


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
        self._layer_loads = [self._plan(placed, by_layer(placed.part.segments)) for placed in parts]

    def of(self, op: TransferOp) -> Sequence[RankPlan]:
        if op.kind is OpKind.D2H:
            return self._stores
        return self._layer_loads if op.layerwise else self._loads

    def close(self) -> None:
        for plan in (*self._loads, *self._layer_loads):
            if isinstance(plan.work, KernelPlan):
                plan.work.close()

    def _plan(self, placed: PlacedPart, groups: Sequence[Sequence[Segment]]) -> RankPlan:
        """groups: segments whose arrival is signalled together, in order."""
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
        layers = [group[0].layer for group in groups]
        work: KernelPlan | list[Stage]
        if path is CudaPath.ROWS:
            plans = [RowPlan(group, *self._slots) for group in rows]
            work = [Stage(plan, [layer]) for plan, layer in zip(plans, layers, strict=True)]
        elif path is CudaPath.BATCH:
            work = [
                Stage(BatchPlan(group, *self._slots), [layer])
                for group, layer in zip(pieces, layers, strict=True)
            ]
        else:
            memory.device.activate()
            work = KernelPlan(memory.device, cut(pieces), *self._slots, self._thread_blocks)
        return RankPlan(memory, placed.place, layers, work)

    def _choose(self, share_bytes: int, *, num_commands: int, num_copies: int) -> CudaPath:
        if self._path is not CudaPath.AUTO:
            return self._path
        if share_bytes >= num_commands * MIN_COMMAND_BYTES:
            return CudaPath.ROWS
        if share_bytes >= num_copies * MIN_COPY_BYTES and batch_function()[0]:
            return CudaPath.BATCH
        return CudaPath.KERNEL
