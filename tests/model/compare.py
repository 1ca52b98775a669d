"""Comparison of the reference model with a snapshot and the counters of the index."""

from __future__ import annotations

from typing import Any

from radixshmem import ComponentType, EventReason
from radixshmem.index import Index, Snapshot
from radixshmem.records import SnapshotSummary
from radixshmem.stats import name_stats
from tests.model.blocks import SIDES
from tests.model.reference import FULL, Model

NAMES = {ComponentType.FULL: "full", ComponentType.SWA: "swa", ComponentType.MAMBA: "mamba"}


def check_nodes(model: Model, snapshot: Snapshot) -> None:
    """Every block with its place, pins and windows; every staged FULL slot with its owner."""
    published, staged = {}, {}
    for node in snapshot.nodes():
        if not node.is_published:
            staged[node.slot] = node.owner
            continue
        sides = {s: (r.slot, r.pins, r.cover, r.is_end) for s, r in node.sides.items()}
        parent = node.parent if node.parent is not None and node.parent >= 0 else None
        published[node.slot] = (node.hash, parent, node.num_children, node.pins, node.is_path_pinned, sides)
    assert staged == {slot: owner for slot, (owner, _) in model.pools[FULL].staged.items()}
    assert published == {block.slot: describe(block) for block in model.blocks()}


def describe(block: Any) -> tuple[Any, ...]:
    sides = {
        name: (-1 if side.slot is None else side.slot, side.pins, side.cover, side.is_end)
        for name, side in block.sides.items()
    }
    parent = None if block.parent is None else block.parent.slot
    return block.hash, parent, len(block.children), block.pins, block.is_path_pinned, sides


def check_summary(model: Model, summary: SnapshotSummary) -> None:
    blocks = list(model.blocks())
    assert summary.num_pins == sum(block.pins for block in blocks)
    for component, pool in model.pools.items():
        assert summary.free[component] == len(pool.free)
        assert summary.staged[component] == len(pool.staged)
        assert summary.pinned[component] + summary.evictable[component] == pool.num_published
    assert summary.pinned[FULL] == sum(block.is_path_pinned for block in blocks)
    for side in SIDES:
        assert summary.pinned[side] == len(held_slots(model, side))


def held_slots(model: Model, side: ComponentType) -> set[int | None]:
    """Slots that stay: pinned ones, and those of windows in which any block is pinned."""
    held = set()
    for block in model.blocks():
        if block.sides[side].pins:
            held.add(block.sides[side].slot)
        window = list(block.upwards(model.pools[side].window))
        if block.sides[side].is_end and any(b.sides[side].pins for b in window):
            held |= {b.sides[side].slot for b in window}
    return held - {None}


def check_counts(model: Model, before: dict[str, Any], index: Index) -> None:
    now = name_stats(index.stats())
    for component, pool in model.pools.items():
        name = NAMES[component]
        counts = now["pool"][name]
        assert counts["num_free"] == len(pool.free)
        assert counts["num_staged"] == len(pool.staged)
        assert counts["num_published"] == pool.num_published
        assert counts["num_listed"] == len(model.lists[component].order)
        for what, key in (
            ("inserted", "inserted_blocks"),
            ("allocated", "allocated_slots"),
            ("recycled", "recycled_slots"),
        ):
            assert now[key][name] - before[key][name] == model.counts[what, component], (what, name)
        for reason in (EventReason.CAPACITY, EventReason.REQUEST, EventReason.RESET):
            key = reason.name.lower()
            evicted = now["evicted_blocks"][name][key] - before["evicted_blocks"][name][key]
            assert evicted == model.counts[f"evicted {key}", component], (key, name)
