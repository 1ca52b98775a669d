"""Matching for loads and stores: the planner's decisions carried out on the tier.

Guarantees: whatever goes wrong half-way, what was pinned and taken is given back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv_radix.hold import Hold
from flexkv_radix.planner import NO_BLOCKS, Blocks, Transfer, plan_get, plan_put
from flexkv_radix.ring import Hashes
from flexkv_radix.tier import CacheEngineRadixShmem
from flexkv_radix.transfer.protocol import OpKind
from radixshmem import ComponentType


@dataclass(slots=True)
class Matched:
    """What has to move for one request, and what is held for it.

    hit: blocks found.  needs_launch: there is something to move.  num_missing: blocks that no slot
    could be had for.
    """

    hold: Hold = field(default_factory=Hold)
    blocks: Blocks = NO_BLOCKS
    transfers: tuple[Transfer, ...] = ()
    hit: int = 0
    num_taken: int = 0
    num_missing: int = 0
    needs_launch: bool = False


def match_get(tier: CacheEngineRadixShmem, hashes: Hashes, wanted: Blocks, *, swa: bool) -> Matched:
    """Find and pin what a load can have of the wanted blocks.  RadixError passes through."""
    match = tier.match(hashes, swa=swa and tier.swa_window_blocks > 0)
    hit = match.common_hit
    try:
        plan = plan_get(wanted, hit, match.slots, match.swa_start, match.swa_slots)
    except BaseException:
        match.release()
        raise
    if not plan.transfers:
        match.release()
        return Matched(Hold(), NO_BLOCKS, (), hit)
    return Matched(Hold([match]), plan.blocks, plan.transfers, hit, 0, 0, True)


def match_put(tier: CacheEngineRadixShmem, hashes: Hashes, wanted: Blocks, *, swa: bool) -> Matched:
    """Pin what is there and stage slots for what is not.  RadixError passes through.

    With swa, a sequence whose blocks are all there still needs a launch if its window is not.
    """
    result = Matched()
    try:
        match = tier.match(hashes)  # FULL alone: the pin keeps the path that the new blocks hang on
        result.hold.matches.append(match)
        result.hit = match.full_hit
        plan = plan_put(wanted, len(hashes), match.full_hit)
        slots = tier.take(len(plan.blocks))
        result.hold.staged.append(tier.stage(hashes, result.hit, slots))
        result.num_taken, result.num_missing = len(slots), len(plan.blocks) - len(slots)
        result.blocks = plan.with_slots(len(slots)).blocks
        result.needs_launch = len(slots) > 0 or (swa and _lacks_window(tier, hashes, match.full_hit))
        if result.needs_launch:
            result.transfers = (Transfer(OpKind.D2H, ComponentType.FULL, slots),)
        else:
            result.hold.give_back()
    except BaseException:
        result.hold.give_back()
        raise
    return result


def _lacks_window(tier: CacheEngineRadixShmem, hashes: Hashes, full_hit: int) -> bool:
    """Whether the whole sequence is there but its window is not."""
    if not tier.swa_window_blocks or full_hit < len(hashes):
        return False
    match = tier.match(hashes, swa=True)
    match.release()
    return match.common_hit < full_hit


@dataclass(frozen=True, slots=True)
class Window:
    """What has to move for a put's window.  num_missing: blocks of it that no slot could be had for."""

    transfer: Transfer
    num_missing: int


def window_transfer(tier: CacheEngineRadixShmem, hold: Hold, num_blocks: int) -> Window:
    """Stage slots for the last num_blocks blocks of a put's window.

    All or none.  With none the put still stores its other blocks, which are good, but it will not succeed.
    """
    slots, staged = tier.take(num_blocks, ComponentType.SWA), hold.staged[0]
    num_missing = num_blocks - len(slots)
    if num_missing:
        staged.shortfall = no_slot(f"the {num_missing} blocks of the window")
    staged.add_swa(slots)
    return Window(Transfer(OpKind.D2H, ComponentType.SWA, slots), num_missing)


def no_slot(what: str) -> str:
    """The error of a put for what of which nothing could be staged."""
    return f"no slot for {what}: all are pinned or staged, or the index is locked by another client"
