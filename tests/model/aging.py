"""Which block goes next: the eviction lists as plain Python lists, from old to young."""

from __future__ import annotations

from tests.model.blocks import Block


class Clock:
    """Counts the verbs that placed or freed something."""

    def __init__(self) -> None:
        self.now = 0
        self.dirty = False

    def commit(self) -> None:
        self.now += self.dirty
        self.dirty = False


class Budget:
    """Looks at list entries that one verb may spend: readers may touch them as fast as they are looked at."""

    def __init__(self, num_listed: int, num_wanted: int) -> None:
        self.left = 2 * num_listed + 2 * num_wanted + 128


class Aging:
    """One list.  ``second_chance``: an entry used since it was placed moves to the young end (lru); else
    use does not matter (fifo)."""

    def __init__(self, clock: Clock, second_chance: bool) -> None:
        self.order: list[Block] = []
        self.placed: dict[Block, int] = {}
        self._clock = clock
        self._second_chance = second_chance

    def enter_young(self, block: Block) -> None:
        block.last_access = self._clock.now
        self._place(block, len(self.order), self._clock.now)

    def enter_old(self, block: Block, stamp: int) -> None:
        self._place(block, 0, stamp)

    def leave(self, block: Block) -> None:
        self.order.remove(block)

    def pass_over(self, block: Block) -> None:
        self.leave(block)
        self._place(block, len(self.order), self.placed[block])

    def victim(self, budget: Budget) -> Block | None:
        """The oldest entry that was not used since it was placed."""
        while self.order and budget.left:
            budget.left -= 1
            block = self.order[0]
            if not (self._second_chance and block.last_access > self.placed[block]):
                return block
            self.leave(block)
            self._place(block, len(self.order), block.last_access)
        return None

    def _place(self, block: Block, at: int, stamp: int) -> None:
        assert block not in self.order
        self.order.insert(at, block)
        self.placed[block] = stamp
        self._clock.dirty = True
