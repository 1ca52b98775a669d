"""Blocks and pools of the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from radixshmem import ComponentType

SIDES = (ComponentType.SWA, ComponentType.MAMBA)


@dataclass
class Side:
    """What a block has of a side component."""

    slot: int | None = None
    pins: int = 0
    cover: int = 0
    is_end: bool = False


@dataclass(eq=False)
class Block:
    """A published block.  ``tree`` counts the resets before its tree began."""

    hash: int
    slot: int
    parent: Block | None
    tree: int
    last_access: int
    pins: int = 0
    children: dict[int, Block] = field(default_factory=dict)
    sides: dict[ComponentType, Side] = field(default_factory=lambda: {side: Side() for side in SIDES})

    @property
    def is_evictable(self) -> bool:
        return not self.children and not self.pins

    @property
    def is_path_pinned(self) -> bool:
        return self.pins > 0 or any(child.is_path_pinned for child in self.children.values())

    def upwards(self, num_blocks: int) -> Iterator[Block]:
        """This block and the ones above it, at most ``num_blocks``."""
        block: Block | None = self
        while block is not None and num_blocks:
            yield block
            block, num_blocks = block.parent, num_blocks - 1


@dataclass
class Pool:
    """Slots of one component.  ``staged``: slot -> (client entry, tree that was current)."""

    num_slots: int
    window: int = 0
    free: set[int] = field(default_factory=set)
    staged: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = set(range(self.num_slots))

    @property
    def num_published(self) -> int:
        return self.num_slots - len(self.free) - len(self.staged)
