"""What the worker needs of CPU and CUDA alike, and the checks that come before any byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from flexkv_radix.placement import place_ranks
from flexkv_radix.transfer.mapping import MappedStore
from flexkv_radix.transfer.protocol import OpKind, RankPart, RankPlace, RegisterRank, TransferOp
from flexkv_radix.transfer.segments import check_cover, check_segments
from radixshmem.geometry import ComponentType

# Eventfds of a rank's layers, in order; None: the op signals nobody.
LayerFds: TypeAlias = "Mapping[RankPlace, Sequence[int]] | None"


class Pending(Protocol):
    """A transfer under way."""

    def is_done(self) -> bool:
        """Whether the bytes are in place; RuntimeError when they never will be."""


class Mover(Protocol):
    """Moves the blocks of ops that were checked."""

    def start(self, op: TransferOp, layer_fds: LayerFds) -> Pending: ...

    def close(self) -> None: ...


class RankMemory(Protocol):
    """A registered rank's memory, mapped into this process."""

    @property
    def rank(self) -> RegisterRank: ...

    def tensor_address(self, part: RankPart, tensor: int) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PlacedPart:
    """One rank's part of a component, offsets absolute in the slot."""

    part: RankPart
    memory: RankMemory

    @property
    def place(self) -> RankPlace:
        return self.memory.rank.place


@dataclass(frozen=True)
class Placement:
    """All ranks of an engine, placed in the slots of a store."""

    store: MappedStore
    parts: Mapping[ComponentType, Sequence[PlacedPart]]

    def num_blocks(self, component: ComponentType) -> int:
        """Blocks that every rank has."""
        return min(placed.part.num_blocks for placed in self.parts[component])

    def is_on_device(self) -> bool:
        """Whether the tensors are CUDA's; ValueError if some are and some are not."""
        on_device = {
            bool(placed.memory.rank.device_uuid) for parts in self.parts.values() for placed in parts
        }
        if len(on_device) > 1:
            raise ValueError("some ranks registered CPU tensors and some CUDA tensors")
        return on_device.pop()

    def moved_bytes(self, op: TransferOp) -> int:
        """Bytes that op moves, all ranks together."""
        return len(op.slots) * sum(
            placed.part.share_bytes
            for placed in self.parts[op.component]
            if placed.part.stores or op.kind is OpKind.H2D
        )

    def check(self, op: TransferOp) -> None:
        """Raise ValueError unless every block and slot of op exists on every rank, each slot stored once."""
        pool = self.store.pool(op.component)
        if op.component not in self.parts:
            raise ValueError(f"component: no rank registered {op.component.name} tensors")
        _check_range("gpu_blocks", op.gpu_blocks, self.num_blocks(op.component))
        _check_range("slots", op.slots, pool.num_slots)
        if op.kind is OpKind.D2H and len(np.unique(op.slots)) != len(op.slots):
            raise ValueError("slots: a slot is named twice, two blocks would mix in it")


def _check_range(name: str, ids: npt.NDArray[np.integer[Any]], limit: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
        raise ValueError(f"{name}: {ids.min()}..{ids.max()} asked for, 0..{limit - 1} exist")


def place(store: MappedStore, memories: Sequence[RankMemory]) -> Placement:
    """Put every rank's part in its place; ValueError unless they fit their tensors and fill the slots."""
    for memory in memories:
        _check_views(memory.rank)
    by_place = {memory.rank.place: memory for memory in memories}
    parts: dict[ComponentType, list[PlacedPart]] = {}
    for rank in place_ranks([memory.rank for memory in memories]):
        for part in rank.parts:
            parts.setdefault(part.component, []).append(PlacedPart(part, by_place[rank.place]))
    for component, placed_parts in parts.items():
        slot_bytes = store.pool(component).slot_bytes
        for placed in placed_parts:
            tensor_bytes = [tensor.num_bytes for tensor in placed.part.tensors]
            check_segments(placed.part.segments, placed.part.num_blocks, tensor_bytes, slot_bytes)
        check_cover([placed.part.segments for placed in placed_parts if placed.part.stores], slot_bytes)
    return Placement(store, parts)


def _check_views(rank: RegisterRank) -> None:
    for part in rank.parts:
        for view in part.tensors:
            if not 0 <= view.storage < len(rank.storages):
                raise ValueError(
                    f"{rank.place}: a tensor names storage {view.storage}, {len(rank.storages)} came"
                )
            if min(view.offset_bytes, view.num_bytes) < 0 or (
                view.offset_bytes + view.num_bytes > rank.storages[view.storage].num_bytes
            ):
                raise ValueError(f"{rank.place}: a tensor exceeds its storage: {view}")
