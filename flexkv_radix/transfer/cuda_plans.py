"""How each rank's part of a component is moved: by the copy engine if that suits it, else by a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv_radix.transfer.cuda_kernel import KernelPlan, cut
from flexkv_radix.transfer.cuda_memory import CudaRankMemory
from flexkv_radix.transfer.cuda_rows import RowPlan, Rows, rows_of
from flexkv_radix.transfer.mover import PlacedPart, Placement
from flexkv_radix.transfer.protocol import CudaPath, OpKind, RankPart, RankPlace, TransferOp
from flexkv_radix.transfer.segments import Segment, by_layer, coalesce
from radixshmem.geometry import ComponentType

# Bytes that a command of the copy engine should move: its fixed cost is about 2 us, 100 KiB of the bus.
COMMAND_BYTES = 256 << 10


@dataclass(frozen=True)
class Stage:
    """Rows that are queued together, and the layers that are in place after them."""

    rows: RowPlan
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
        self._loads = [self._whole(placed) for placed in parts]
        self._stores = [plan for plan, placed in zip(self._loads, parts, strict=True) if placed.part.stores]
        self._layer_loads = [self._by_layer(placed) for placed in parts]

    def of(self, op: TransferOp) -> Sequence[RankPlan]:
        if op.kind is OpKind.D2H:
            return self._stores
        return self._layer_loads if op.layerwise else self._loads

    def close(self) -> None:
        for plan in (*self._loads, *self._layer_loads):
            if isinstance(plan.work, KernelPlan):
                plan.work.close()

    def _whole(self, placed: PlacedPart) -> RankPlan:
        segments = coalesce(placed.part.segments)
        rows = rows_of(_pieces(placed, segments))
        if self._suits(placed.part, len(rows), COMMAND_BYTES):
            return _rank_plan(placed, [0], [Stage(RowPlan(rows, *self._slots), [])])
        return self._kernel(placed, [segments])

    def _by_layer(self, placed: PlacedPart) -> RankPlan:
        """The first layer by itself, so that the forward can start; then as many as fill a command."""
        layers = by_layer(placed.part.segments)
        stages: list[tuple[list[Rows], list[int]]] = []
        waiting: list[Segment] = []
        numbers: list[int] = []
        for segments in layers:
            waiting += segments
            numbers.append(segments[0].layer)
            rows = rows_of(_pieces(placed, coalesce(waiting)))
            if (
                not stages
                or sum(s.num_bytes for s in waiting) >= len(rows) * COMMAND_BYTES
                or segments is layers[-1]
            ):
                stages.append((rows, numbers))
                waiting, numbers = [], []
        # Stages at the ends are shorter than the rest.
        if self._suits(placed.part, sum(len(rows) for rows, _ in stages), COMMAND_BYTES // 2):
            work = [Stage(RowPlan(rows, *self._slots), numbers) for rows, numbers in stages]
            return _rank_plan(placed, [segments[0].layer for segments in layers], work)
        return self._kernel(placed, layers)

    def _suits(self, part: RankPart, num_commands: int, command_bytes: int) -> bool:
        if self._path is CudaPath.AUTO:
            return part.share_bytes >= num_commands * command_bytes
        return self._path is CudaPath.COPY_ENGINE

    def _kernel(self, placed: PlacedPart, groups: Sequence[Sequence[Segment]]) -> RankPlan:
        memory = _memory(placed)
        memory.device.activate()
        table = cut([[(memory.tensor_address(placed.part, s.tensor), s) for s in group] for group in groups])
        kernel = KernelPlan(memory.device, table, *self._slots, self._thread_blocks)
        return _rank_plan(placed, [group[0].layer for group in groups], kernel)


def _rank_plan(placed: PlacedPart, layers: Sequence[int], work: KernelPlan | Sequence[Stage]) -> RankPlan:
    return RankPlan(_memory(placed), placed.place, layers, work)


def _memory(placed: PlacedPart) -> CudaRankMemory:
    assert isinstance(placed.memory, CudaRankMemory)
    return placed.memory


def _pieces(placed: PlacedPart, segments: Sequence[Segment]) -> list[tuple[int, int, Segment]]:
    memory, part = _memory(placed), placed.part
    return [(memory.allocation(part, s.tensor), memory.tensor_address(part, s.tensor), s) for s in segments]
