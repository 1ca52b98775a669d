"""What has to move for a request, in blocks.  Pure: no torch, no I/O, no clock.

    blocks of the sequence   0 ......... hit ......... end
    GET   moves the wanted blocks below the hit, and the window's SWA blocks among them
    PUT   takes slots for the blocks from the hit on, moves and publishes them in order

All of it in block numbers of one sequence; tokens.py knows about tokens, tasks.py does the I/O.

The records are not frozen only because making a frozen one costs three times as much, and a match of
some 20 µs makes half a dozen; nobody changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexkv_radix.transfer.protocol import OpKind
from radixshmem.geometry import ComponentType

BlockIds = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

NO_SLOTS: Slots = np.empty(0, dtype=np.int32)
NO_SLOTS.setflags(write=False)
_NO_IDS: BlockIds = np.empty(0, dtype=np.int64)


@dataclass(slots=True, unsafe_hash=True)
class Blocks:
    """Some blocks of a sequence in ascending order: start..end, or ids where there are gaps."""

    start: int
    end: int
    ids: BlockIds | None = None

    @classmethod
    def of(cls, ids: BlockIds) -> Blocks:
        """From ascending, distinct block numbers."""
        if len(ids) == 0:
            return cls(0, 0)
        start, end = int(ids[0]), int(ids[-1]) + 1
        return cls(start, end) if end - start == len(ids) else cls(start, end, ids)

    def __len__(self) -> int:
        return self.end - self.start if self.ids is None else len(self.ids)

    def below(self, end: int) -> Blocks:
        """Those before block end."""
        if self.end <= end:
            return self
        if self.ids is not None:
            return Blocks.of(self.ids[: np.searchsorted(self.ids, end)])
        return Blocks(self.start, end) if end > self.start else Blocks(0, 0)

    def run_from(self, start: int) -> Blocks:
        """The longest gapless run that begins with block start; empty if start is not among them."""
        if self.ids is None:
            return Blocks(start, self.end) if self.start <= start < self.end else Blocks(0, 0)
        tail = self.ids[np.searchsorted(self.ids, start) :]
        run = int(np.argmax(np.append(tail - np.arange(start, start + len(tail)), -1) != 0))
        return Blocks(start, start + run) if run else Blocks(0, 0)

    def pick(self, slots: Slots) -> Slots:
        """slots[block] of each."""
        return slots[self.start : self.end] if self.ids is None else slots[self.ids]


NO_BLOCKS = Blocks(0, 0)


@dataclass(slots=True)
class Transfer:
    """Slots of one component to be moved to or from engine blocks, which the launch brings."""

    kind: OpKind
    component: ComponentType
    slots: Slots


@dataclass(slots=True)
class GetPlan:
    """blocks move by transfers: FULL for all of them, SWA for the last if the match had a window."""

    blocks: Blocks
    transfers: tuple[Transfer, ...]


@dataclass(slots=True)
class PutPlan:
    """Take a slot for each of blocks, a gapless run behind the hit."""

    blocks: Blocks

    def with_slots(self, num_slots: int) -> PutPlan:
        """The same as far as num_slots go: blocks are published in order, so the tail is dropped."""
        return PutPlan(self.blocks.below(self.blocks.start + num_slots) if num_slots else NO_BLOCKS)


def plan_get(wanted: Blocks, common_hit: int, full_slots: Slots, swa_start: int, swa_slots: Slots) -> GetPlan:
    """Plan a load.

    full_slots[b] holds block b < common_hit, swa_slots[i] block swa_start + i.  SWA blocks in front of
    the first wanted block are left out: who has that block has its window as well.
    """
    blocks = wanted.below(common_hit)
    if not len(blocks):
        return GetPlan(NO_BLOCKS, ())
    full = Transfer(OpKind.H2D, ComponentType.FULL, blocks.pick(full_slots))
    window = swa_slots[max(0, blocks.start - swa_start) :] if len(swa_slots) else NO_SLOTS
    if not len(window):
        return GetPlan(blocks, (full,))
    return GetPlan(blocks, (full, Transfer(OpKind.H2D, ComponentType.SWA, window)))


def plan_put(wanted: Blocks, num_blocks: int, full_hit: int) -> PutPlan:
    """Plan a store of the blocks from full_hit on, up to the first that is not wanted.

    A block can be published only behind its predecessor: if block full_hit is not wanted, nothing moves.
    """
    return PutPlan(wanted.run_from(full_hit) if full_hit < num_blocks else NO_BLOCKS)


def bind(transfers: Sequence[Transfer], gpu_blocks: Sequence[BlockIds]) -> list[tuple[Transfer, BlockIds]]:
    """Pair transfers with engine blocks; ValueError if a length differs.  Empty ones are left out."""
    bound = []
    for transfer, blocks in zip(transfers, gpu_blocks, strict=True):
        if len(transfer.slots) != len(blocks):
            name = "slot_mapping" if transfer.component is ComponentType.FULL else "swa_slot_mapping"
            raise ValueError(f"{name}: {len(blocks)} blocks given, {len(transfer.slots)} are to be moved")
        if len(blocks):
            bound.append((transfer, blocks))
    return bound


def merge(bound: Iterable[tuple[Transfer, BlockIds]]) -> list[tuple[Transfer, BlockIds]]:
    """One transfer per direction and component, in the order of first appearance."""
    groups: dict[tuple[OpKind, ComponentType], list[tuple[Transfer, BlockIds]]] = {}
    for transfer, blocks in bound:
        groups.setdefault((transfer.kind, transfer.component), []).append((transfer, blocks))
    return [_concatenate(group) for group in groups.values()]


def _concatenate(group: list[tuple[Transfer, BlockIds]]) -> tuple[Transfer, BlockIds]:
    if len(group) == 1:
        return group[0]
    first = group[0][0]
    slots = np.concatenate([transfer.slots for transfer, _ in group])
    return Transfer(first.kind, first.component, slots), np.concatenate([blocks for _, blocks in group])


def signal_all(
    bound: list[tuple[Transfer, BlockIds]], components: Sequence[ComponentType]
) -> list[tuple[Transfer, BlockIds]]:
    """bound with an empty load for each of components that it lacks, unless it is empty itself.

    A layerwise load announces the layers of the components that it names, and the forward waits for all.
    """
    missing = set(components) - {transfer.component for transfer, _ in bound}
    if not bound or not missing:
        return bound
    return bound + [(Transfer(OpKind.H2D, component, NO_SLOTS), _NO_IDS) for component in sorted(missing)]
