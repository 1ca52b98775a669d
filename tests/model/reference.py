"""The index as one would write it without crashes, processes or speed in mind.

Every verb of the core with its results, order of eviction and events.  Slots are chosen by the core:
``stage`` takes what it chose.  A client is named by its entry in the client table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixshmem import ComponentType, EventKind, EventReason, InsertError
from tests.model.aging import Aging, Budget, Clock
from tests.model.blocks import SIDES, Block, Pool, Side

FULL = ComponentType.FULL
BATCH = 64  # positions of an insert that are published in one go


class Match(NamedTuple):
    full_hit: int
    common_hit: int
    slots: list[int]
    swa_slots: list[int]
    mamba_slots: list[int]


class ModelEvent(NamedTuple):
    kind: EventKind
    reason: EventReason
    hash: int
    parent_hash: int | None
    component: ComponentType
    client: int


@dataclass
class Pin:
    block: Block
    mask: int


class Ledger:
    """Pin records of one entry; a free list that outlives the clients of the entry."""

    def __init__(self, num_records: int) -> None:
        self.free = list(range(num_records))
        self.pins: dict[int, Pin] = {}


class Model:
    def __init__(self, pools: dict[ComponentType, Pool], pins_per_client: int, second_chance: bool) -> None:
        self.pools = pools
        self.clock = Clock()
        self.lists = {component: Aging(self.clock, second_chance) for component in pools}
        self.tree = 0
        self.roots: dict[int, dict[int, Block]] = {0: {}}
        self.events: list[ModelEvent] = []
        self.counts: Counter[tuple[str, ComponentType]] = Counter()
        self.draining = False
        self._pins_per_client = pins_per_client
        self._ledgers: dict[int, Ledger] = {}
        self._client = 0

    def ledger(self, client: int) -> Ledger:
        return self._ledgers.setdefault(client, Ledger(self._pins_per_client))

    def blocks(self) -> Iterator[Block]:
        """Every published block, of old trees too."""
        stack = [block for root in self.roots.values() for block in root.values()]
        while stack:
            block = stack.pop()
            yield block
            stack += block.children.values()

    # -- match ----------------------------------------------------------------------------------------

    def walk(self, hashes: Sequence[int]) -> list[Block]:
        level, path = self.roots[self.tree], []
        for value in hashes:
            if value not in level:
                break
            path.append(level[value])
            level = level[value].children
        return path

    def match(self, hashes: Sequence[int], mask: int) -> Match:
        path = self.walk(hashes)
        hit = next((p for p in range(len(path), 0, -1) if self._serves(path[:p], mask)), 0)
        window = {side: [] for side in SIDES}
        for side in SIDES:
            if hit and mask >> side & 1:
                window[side] = [b.sides[side].slot for b in path[max(0, hit - self.pools[side].window) : hit]]
        return Match(len(path), hit, [b.slot for b in path[:hit]], *window.values())

    def _serves(self, path: list[Block], mask: int) -> bool:
        """Whether every component of the mask has the window that ends ``path``."""
        return all(
            block.sides[side].slot is not None
            for side in SIDES
            if mask >> side & 1
            for block in path[-self.pools[side].window :]
        )

    def touch(self, hashes: Sequence[int], mask: int) -> None:
        path = self.walk(hashes)[: self.match(hashes, mask).common_hit]
        if path:
            path[-1].last_access = self.clock.now

    # -- pins -----------------------------------------------------------------------------------------

    def has_pin_room(self, client: int) -> bool:
        return bool(self.ledger(client).free)

    def pin(self, client: int, hashes: Sequence[int], mask: int) -> int:
        """Pin the joint match; returns the record's number."""
        block = self.walk(hashes)[self.match(hashes, mask).common_hit - 1]
        ledger = self.ledger(client)
        record = ledger.free.pop(0)
        ledger.pins[record] = Pin(block, mask)
        if block.is_evictable:
            self.lists[FULL].leave(block)
        block.pins += 1
        for side in self._sides_of(mask):
            for covered in block.upwards(self.pools[side].window):
                covered.sides[side].pins += 1
        self.clock.commit()
        return record

    def release(self, client: int, record: int) -> None:
        self._begin(client)
        self._unpin(client, record)
        self._drain()
        self.clock.commit()

    def _unpin(self, client: int, record: int) -> None:
        ledger = self.ledger(client)
        pin = ledger.pins.pop(record)
        ledger.free.insert(0, record)
        for side in self._sides_of(pin.mask):
            for block in pin.block.upwards(self.pools[side].window):
                block.sides[side].pins -= 1
                self._detach_if_unused(side, block, EventReason.CAPACITY)
        pin.block.pins -= 1
        if pin.block.is_evictable:
            self._enter_unpinned(pin.block)

    def _enter_unpinned(self, block: Block) -> None:
        if block.tree == self.tree:
            self.lists[FULL].enter_young(block)
        else:
            self.lists[FULL].enter_old(block, self.lists[FULL].placed.get(block, 0))
            self.draining = True

    def _sides_of(self, mask: int) -> list[ComponentType]:
        return [side for side in SIDES if mask >> side & 1]

    # -- slots ----------------------------------------------------------------------------------------

    def make_room(self, client: int, component: ComponentType, num: int) -> int:
        """Evict for an allocation of ``num`` slots; returns how many it will get."""
        self._begin(client)
        pool = self.pools[component]
        if component != FULL:
            pinned = sum(block.sides[component].pins > 0 for block in self.blocks())
            if len(pool.staged) + pinned + num > pool.num_slots:
                return 0
        if len(pool.free) < num:
            self._evict(component, num - len(pool.free), num, EventReason.CAPACITY)
        self.clock.commit()
        if component != FULL and len(pool.free) < num:
            self.counts["allocated", component] += len(pool.free)  # taken and given back
            self.counts["recycled", component] += len(pool.free)
            return 0
        return min(num, len(pool.free))

    def stage(self, client: int, component: ComponentType, slots: Sequence[int]) -> None:
        pool = self.pools[component]
        for slot in slots:
            pool.free.remove(slot)
            pool.staged[slot] = (client, self.tree)
        self.counts["allocated", component] += len(slots)

    def staged_by(self, client: int, component: ComponentType) -> list[int]:
        return sorted(slot for slot, (owner, _) in self.pools[component].staged.items() if owner == client)

    def recycle(self, component: ComponentType, slots: Sequence[int]) -> None:
        pool = self.pools[component]
        for slot in slots:
            del pool.staged[slot]
            pool.free.add(slot)
        self.counts["recycled", component] += len(slots)

    # -- insert ---------------------------------------------------------------------------------------

    def insert(
        self,
        client: int,
        component: ComponentType,
        hashes: Sequence[int],
        slots: list[int],
        start: int,
        keep: bool,
    ) -> tuple[InsertError, list[int], int]:
        """(error, unused slots, blocks inserted).  ``keep``: unused slots stay staged."""
        self._begin(client)
        if not slots:
            return InsertError.OK, [], 0
        pool = self.pools[component]
        if any(pool.staged[slot][1] != self.tree for slot in slots):
            self.recycle(component, slots)
            return InsertError.STALE_GENERATION, slots, 0
        path = self.walk(hashes)
        missing = None
        if component == FULL and len(path) < start:
            missing = InsertError.PREFIX_MISSING
        if component != FULL and len(path) < len(hashes):
            missing = InsertError.FULL_PATH_MISSING
        if missing is not None:
            unused, error = slots, missing
        else:
            insert = self._insert_full if component == FULL else self._insert_side
            unused, error = insert(component, hashes, path, slots), InsertError.OK
        if not keep:
            self.recycle(component, unused)
        self.clock.commit()
        return error, unused, len(slots) - len(unused)

    def _insert_full(
        self, component: ComponentType, hashes: Sequence[int], path: list[Block], slots: list[int]
    ) -> list[int]:
        start = len(hashes) - len(slots)
        num_there = max(0, len(path) - start)
        for value, slot in zip(hashes[len(path) :], slots[num_there:], strict=True):
            path.append(self._link(value, slot, path[-1] if path else None))
        last = path[-1]
        if num_there < len(slots):
            self.lists[FULL].enter_young(last)
        else:
            last.last_access = self.clock.now
            if len(slots) > BATCH and last.is_evictable:  # was pinned between the batches
                self.lists[FULL].leave(last)
                self.lists[FULL].enter_young(last)
        self.counts["inserted", FULL] += len(slots) - num_there
        return slots[:num_there]

    def _link(self, value: int, slot: int, parent: Block | None) -> Block:
        if parent is not None and parent in self.lists[FULL].order:
            self.lists[FULL].leave(parent)
        block = Block(value, slot, parent, self.tree, self.clock.now)
        siblings = self.roots[self.tree] if parent is None else parent.children
        assert value not in siblings
        siblings[value] = block
        del self.pools[FULL].staged[slot]
        self._event(EventKind.STORED, EventReason.NONE, block, FULL)
        self.clock.dirty = True
        return block

    def _insert_side(
        self, component: ComponentType, hashes: Sequence[int], path: list[Block], slots: list[int]
    ) -> list[int]:
        pool, unused = self.pools[component], []
        for at, slot in enumerate(slots, len(path) - len(slots)):
            side = path[at].sides[component]
            if at < len(path) - pool.window or side.slot is not None:
                unused.append(slot)
                continue
            side.slot = slot
            del pool.staged[slot]
            self._event(EventKind.STORED, EventReason.NONE, path[at], component)
            self.clock.dirty = True
        self._make_end(component, path[-1])
        self.counts["inserted", component] += len(slots) - len(unused)
        return unused

    def _make_end(self, component: ComponentType, last: Block) -> None:
        if last.sides[component].is_end:
            last.last_access = self.clock.now
            return
        last.sides[component].is_end = True
        for block in last.upwards(self.pools[component].window):
            block.sides[component].cover += 1
        self.lists[component].enter_young(last)

    # -- evict and reset --------------------------------------------------------------------------------

    def evict(self, client: int, component: ComponentType, num: int, reason: EventReason) -> int:
        self._begin(client)
        num_evicted = self._evict(component, num, num, reason)
        self.clock.commit()
        return num_evicted

    def _evict(self, component: ComponentType, num: int, num_wanted: int, reason: EventReason) -> int:
        """Evict until ``num`` slots went; returns how many did."""
        aging, free = self.lists[component], self.pools[component].free
        num_before, budget = len(free), Budget(len(aging.order), num_wanted)
        while len(free) - num_before < num:
            block = aging.victim(budget)
            if block is None:
                break
            if component == FULL:
                self._evict_leaf(block, reason)
            elif any(b.sides[component].pins for b in block.upwards(self.pools[component].window)):
                aging.pass_over(block)
            else:
                self._drop_end(component, block, reason)
        return len(free) - num_before

    def _evict_leaf(self, block: Block, reason: EventReason) -> None:
        for side in SIDES:
            if block.sides[side].is_end:
                self._drop_end(side, block, reason)
        assert block.sides == {side: Side() for side in SIDES}
        aging, parent = self.lists[FULL], block.parent
        aging.leave(block)
        del (self.roots[block.tree] if parent is None else parent.children)[block.hash]
        self.pools[FULL].free.add(block.slot)
        self._event(EventKind.REMOVED, reason, block, FULL)
        self.clock.dirty = True
        if parent is not None and parent.is_evictable:
            aging.enter_old(parent, aging.placed[block])

    def _drop_end(self, component: ComponentType, end: Block, reason: EventReason) -> None:
        self.lists[component].leave(end)
        end.sides[component].is_end = False
        self.clock.dirty = True
        for block in end.upwards(self.pools[component].window):
            block.sides[component].cover -= 1
            self._detach_if_unused(component, block, reason)

    def _detach_if_unused(self, component: ComponentType, block: Block, reason: EventReason) -> None:
        side = block.sides[component]
        if side.cover or side.pins or side.slot is None:
            return
        self.pools[component].free.add(side.slot)
        side.slot = None
        self._event(EventKind.REMOVED, reason, block, component)
        self.clock.dirty = True

    def reset(self, client: int) -> None:
        self._begin(client)
        self.events.append(ModelEvent(EventKind.CLEARED, EventReason.RESET, 0, None, FULL, client))
        self.tree += 1
        self.roots[self.tree] = {}
        self.draining = True
        self._drain()
        self.clock.commit()

    def _drain(self) -> None:
        """Evict what is unpinned of old trees."""
        order = self.lists[FULL].order
        while self.draining and order and order[0].tree != self.tree:
            self._evict_leaf(order[0], EventReason.RESET)
        self.draining = False

    def close(self, client: int) -> None:
        """The client leaves: its pins go, its staged slots, then what only its pins kept of old trees."""
        self._begin(client)
        for record in sorted(self.ledger(client).pins):
            self._unpin(client, record)
        for component in self.pools:
            self.recycle(component, self.staged_by(client, component))
        self._drain()
        self.clock.commit()

    def _begin(self, client: int) -> None:
        self._client = client

    def _event(self, kind: EventKind, reason: EventReason, block: Block, component: ComponentType) -> None:
        parent_hash = None if block.parent is None else block.parent.hash
        self.events.append(ModelEvent(kind, reason, block.hash, parent_hash, component, self._client))
        if kind == EventKind.REMOVED:
            self.counts[f"evicted {reason.name.lower()}", component] += 1
