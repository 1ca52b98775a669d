"""Transfers between CPU tensors and slots: a thin layer over csrc/copy.c."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flexkv_radix._copy import ffi, lib
from flexkv_radix.transfer.mapping import SharedMemory, map_storages
from flexkv_radix.transfer.mover import LayerFds, Pending, PlacedPart, Placement
from flexkv_radix.transfer.protocol import OpKind, RankPart, RankPlace, RegisterRank, TransferOp
from flexkv_radix.transfer.segments import Segment, by_layer, coalesce
from radixshmem.geometry import ComponentType

_ERRORS = {
    lib.COPY_EBLOCK: "gpu_blocks: no such block",
    lib.COPY_ESLOT: "slots: no such slot",
    lib.COPY_ENOMEM: "out of memory",
    lib.COPY_ESIGNAL: "a layer's eventfd takes no signal",
}


class CpuRankMemory:
    """A rank's CPU storages, mapped from the file descriptors it sent (which stay the caller's)."""

    def __init__(self, rank: RegisterRank, fds: Sequence[int]) -> None:
        self.rank = rank
        sizes_bytes = [storage.num_bytes for storage in rank.storages]
        self._storages: list[SharedMemory] = map_storages(fds, sizes_bytes, str(rank.place))

    def tensor_address(self, part: RankPart, tensor: int) -> int:
        view = part.tensors[tensor]
        return self._storages[view.storage].address + view.offset_bytes

    def close(self) -> None:
        for storage in self._storages:
            storage.close()


class _Done:
    """A transfer that is over before start() returns."""

    def is_done(self) -> bool:
        return True


@dataclass(frozen=True)
class _Group:
    """Pieces that are moved, and announced, together: everything, or one layer of one rank."""

    pieces: Sequence[tuple[int, Segment]]  # address of the segment's tensor
    place: RankPlace
    layer: int = 0


def _pieces(placed: PlacedPart, segments: Iterable[Segment]) -> list[tuple[int, Segment]]:
    return [(placed.memory.tensor_address(placed.part, segment.tensor), segment) for segment in segments]


def _whole(parts: Sequence[PlacedPart]) -> list[_Group]:
    pieces = [piece for placed in parts for piece in _pieces(placed, coalesce(placed.part.segments))]
    return [_Group(pieces, parts[0].place)]


def _layers(parts: Sequence[PlacedPart]) -> list[_Group]:
    groups = [
        _Group(_pieces(placed, segments), placed.place, segments[0].layer)
        for placed in parts
        for segments in by_layer(placed.part.segments)
    ]
    return sorted(groups, key=lambda group: group.layer)


class _Plan:
    """A copy_plan and whose eventfd announces each of its groups."""

    def __init__(self, placement: Placement, component: ComponentType, groups: Sequence[_Group]) -> None:
        segments = [
            (address + s.base_bytes, s.block_stride_bytes, s.num_bytes, s.slot_offset_bytes, number)
            for number, group in enumerate(groups)
            for address, s in group.pieces
        ]
        pool = placement.store.pool(component)
        slots = (
            placement.store.pool_address(component),
            pool.stride_bytes,
            pool.num_slots,
            placement.num_blocks(component),
        )
        plan = lib.copy_plan_new(
            ffi.new("copy_segment[]", segments), len(segments), ffi.new("copy_slots *", slots)
        )
        if plan == ffi.NULL:
            raise MemoryError("copy_plan_new")
        self.c_plan: Any = ffi.gc(plan, lib.copy_plan_free)
        self._groups = [(group.place, group.layer) for group in groups]

    def event_fds(self, layer_fds: LayerFds) -> Any:
        if layer_fds is None:
            return ffi.NULL
        return ffi.new("int[]", [layer_fds[place][layer] for place, layer in self._groups])


class CpuMover:
    """Moves blocks with one crew of threads per direction; start() returns when they are in place."""

    def __init__(self, placement: Placement, copy_threads: int) -> None:
        self._crews = {kind: _new_crew(copy_threads or default_threads()) for kind in OpKind}
        self._stores: dict[ComponentType, _Plan] = {}
        self._loads: dict[ComponentType, _Plan] = {}
        self._layer_loads: dict[ComponentType, _Plan] = {}
        for component, parts in placement.parts.items():
            storing = [placed for placed in parts if placed.part.stores]
            self._stores[component] = _Plan(placement, component, _whole(storing))
            self._loads[component] = _Plan(placement, component, _whole(parts))
            self._layer_loads[component] = _Plan(placement, component, _layers(parts))

    def start(self, op: TransferOp, layer_fds: LayerFds) -> Pending:
        bad = ffi.new("uint64_t *")
        plan = self._plan(op)
        code = lib.copy_run(
            self._crews[op.kind],
            plan.c_plan,
            lib.COPY_TO_SLOTS if op.kind is OpKind.D2H else lib.COPY_FROM_SLOTS,
            ffi.from_buffer("int64_t[]", op.gpu_blocks),
            ffi.from_buffer("int32_t[]", op.slots),
            len(op.slots),
            plan.event_fds(layer_fds),
            bad,
        )
        if code != lib.COPY_OK:
            raise RuntimeError(f"{_ERRORS[code]} (entry {bad[0]})")
        return _Done()

    def _plan(self, op: TransferOp) -> _Plan:
        if op.kind is OpKind.D2H:
            return self._stores[op.component]
        return self._layer_loads[op.component] if op.layerwise else self._loads[op.component]

    def close(self) -> None:
        self._crews.clear()


def default_threads() -> int:
    """Half of the cores this process may use, at most 8: more do not copy faster on one socket."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def _new_crew(num_threads: int) -> Any:
    crew = lib.copy_crew_new(num_threads)
    if crew == ffi.NULL:
        raise OSError(ffi.errno, f"cannot start {num_threads} copy threads: {os.strerror(ffi.errno)}")
    return ffi.gc(crew, lib.copy_crew_free)
