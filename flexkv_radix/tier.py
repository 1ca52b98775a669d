"""The CPU tier: pinned matches and staged inserts on the shared store.

Guarantees: a match's slots keep their bytes until it is released; staged slots are nobody else's
until they are published or aborted, and each of these happens once.
Assumes: one engine per client; methods may be called from several threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flexkv_radix.planner import NO_SLOTS, Slots
from flexkv_radix.ring import Hashes, RingEvents
from radixshmem import (
    COMPONENT_MASK_FULL,
    COMPONENT_MASK_SWA,
    ComponentType,
    Event,
    EventKind,
    InsertError,
    QueryStatus,
    RadixClient,
    RadixError,
)

logger = logging.getLogger(__name__)

# Longer than any batch of another client holds the lock; past it the stored blocks are given up.
_BUSY_TIMEOUT_S = 2.0
_BUSY_RETRY_S = 0.001


class ShmRadixMatch:
    """Blocks found in the tree, pinned until release().

    slots[b] holds block b < common_hit, swa_slots[i] block swa_start + i of the window that ends there.
    full_hit >= common_hit: blocks that FULL alone could serve.
    """

    __slots__ = ("_finalize", "common_hit", "full_hit", "slots", "swa_slots", "swa_start")

    def __init__(
        self, full_hit: int, common_hit: int, slots: Slots, swa_start: int, swa_slots: Slots,
        finalize: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        self.full_hit = full_hit
        self.common_hit = common_hit
        self.slots = slots
        self.swa_start = swa_start
        self.swa_slots = swa_slots
        self._finalize = finalize

    def release(self) -> None:
        """Drop the pin; a second call does nothing."""
        finalize, self._finalize = self._finalize, None
        if finalize is not None:
            finalize()


@dataclass(frozen=True, slots=True)
class Published:
    """What publish() put into the tree: num_blocks new ones.  error: why not everything that was staged."""

    num_blocks: int
    error: str = ""


class StagedRadixInsert:
    """Slots taken for blocks whose bytes are on their way.

    Ends by exactly one publish() or abort(); another one raises RuntimeError.

    shortfall: why less is staged than there should be; publish() tells it unless there is worse to tell.
    """

    def __init__(self, tier: CacheEngineRadixShmem, hashes: Hashes, start: int, slots: Slots) -> None:
        """slots[i] is for block start + i; hashes are those of all blocks up to the last of them."""
        self._tier = tier
        self._hashes = hashes
        self._start = start
        self._slots = slots
        self._swa_slots = NO_SLOTS
        self.shortfall = ""
        self._open = True
        self._guard = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks up to the last staged one."""
        return len(self._hashes)

    def add_swa(self, swa_slots: Slots) -> None:
        """Also stage the window's last blocks: swa_slots[-1] is for the last block of hashes."""
        self._swa_slots = swa_slots

    def publish(self) -> Published:
        """Insert FULL, then SWA, so that the window finds its path."""
        self._end()
        tier = self._tier
        published = Published(0)
        if len(self._slots):
            published = tier.insert(self._hashes, self._slots, start=self._start)
        if len(self._swa_slots):
            if published.error:
                tier.recycle(self._swa_slots, ComponentType.SWA)
            else:
                error = tier.insert(self._hashes, self._swa_slots, component=ComponentType.SWA).error
                published = replace(published, error=error)
        return replace(published, error=published.error or self.shortfall)

    def abort(self) -> None:
        """Give all slots back; nothing becomes matchable."""
        self._end()
        self._tier.recycle(self._slots, ComponentType.FULL)
        self._tier.recycle(self._swa_slots, ComponentType.SWA)

    def _end(self) -> None:
        with self._guard:
            if not self._open:
                raise RuntimeError("a staged insert was ended twice")
            self._open = False


class CacheEngineRadixShmem:
    """The verbs that tasks need, on one RadixClient."""

    def __init__(self, client: RadixClient) -> None:
        self.client = client
        geometry = client.geometry
        if geometry is None:
            raise RadixError("the radix-server has no geometry yet: wait_ready() first")
        self.region = client.index.info.config.epoch.hex()
        swa = geometry["pools"].get("swa")
        self.swa_window_blocks = int(swa["window_blocks"]) if swa else 0
        self.num_slots = {
            ComponentType.FULL: int(geometry["pools"]["full"]["num_slots"]),
            ComponentType.SWA: int(swa["num_slots"]) if swa else 0,
        }
        self.components = [component for component, count in self.num_slots.items() if count]
        # Before anything is published through this tier: its first blocks are announced too.
        self._ring_start = client.index.event_head() if client.kvevent_enabled else 0

    def match(self, hashes: Hashes, *, swa: bool = False) -> ShmRadixMatch:
        """Longest published prefix, pinned; with swa, the longest whose window is there too.

        RadixError if nothing can be pinned, whatever is there.
        """
        mask = COMPONENT_MASK_FULL | COMPONENT_MASK_SWA if swa else COMPONENT_MASK_FULL
        found = self.client.query(hashes, mask=mask, lock=True)
        if found.status:  # not OK
            raise RadixError(_WHY_NO_MATCH[QueryStatus(found.status)])
        slots = found.common_slots()
        if not swa:
            return ShmRadixMatch(found.full_hit, found.common_hit, slots, 0, NO_SLOTS, found.finalize)
        return ShmRadixMatch(
            found.full_hit, found.common_hit, slots, found.swa_start, found.swa_slots, found.finalize
        )

    def take(self, num_slots: int, component: ComponentType = ComponentType.FULL) -> Slots:
        """Stage up to num_slots slots (SWA: all or none), evicting as needed."""
        limit = self.num_slots[component]
        if num_slots > limit:  # asking for more than there is would be an error, not a short answer
            if component is not ComponentType.FULL:
                return NO_SLOTS
            num_slots = limit
        return self.client.allocate_slots(num_slots, component=component) if num_slots else NO_SLOTS

    def stage(self, hashes: Hashes, start: int, slots: Slots) -> StagedRadixInsert:
        """Bind taken slots to blocks start.. of hashes, to be published later."""
        return StagedRadixInsert(self, hashes[: start + len(slots)], start, slots)

    def insert(
        self, hashes: Hashes, slots: Slots, *, start: int = 0, component: ComponentType = ComponentType.FULL
    ) -> Published:
        """Publish; slots of blocks that were there already, or that cannot be published, are recycled."""
        num_new, deadline = 0, time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            result = self.client.insert(hashes, slots, start=start, component=component)
            num_new += result.num_inserted
            if result.error is not InsertError.BUSY:
                return Published(num_new, _WHY.get(result.error, ""))
            done = result.num_inserted + len(result.unused_slots)
            slots = slots[done:]
            if component is ComponentType.FULL:
                start += done
            if time.monotonic() > deadline:
                self.recycle(slots, component)
                return Published(num_new, _WHY[InsertError.BUSY])
            time.sleep(_BUSY_RETRY_S)

    def recycle(self, slots: Slots, component: ComponentType = ComponentType.FULL) -> None:
        """Give staged slots back."""
        if len(slots):
            self.client.recycle_slots(slots, component=component)

    def num_present(self, hashes: Hashes) -> int:
        """Blocks of a path that are in the tree; counts as no use of them."""
        return self.client.query(hashes, update_meta=False).full_hit

    def ring_events(self, cursor: int) -> RingEvents | None:
        """FULL blocks stored by this client or removed by anyone, since cursor; None without a ring.

        Cursor -1: since this tier was made.
        """
        if not self.client.kvevent_enabled:
            return None
        index = self.client.index
        cursor, events, overflow = self.client.events(self._ring_start if cursor < 0 else cursor)
        me = index.slot, index.incarnation & 0xFFFFFFFF
        kept = [event for event in events if _concerns(event, me)]
        kinds = np.array([_KINDS[event.kind] for event in kept], dtype=np.int8)
        hashes = np.array([event.hash for event in kept], dtype=np.uint64)
        return RingEvents(cursor, kinds, hashes, overflow)


def _concerns(event: Event, me: tuple[int, int]) -> bool:
    if event.kind is EventKind.STORED:
        return event.component is ComponentType.FULL and (event.client, event.incarnation) == me
    return event.component is ComponentType.FULL or event.kind is EventKind.CLEARED


_KINDS = {EventKind.STORED: 1, EventKind.REMOVED: -1, EventKind.CLEARED: 0}

_WHY_NO_MATCH = {
    QueryStatus.BUSY: "the index is locked by another client",
    QueryStatus.PIN_LIMIT: "this engine holds as many pins as a client may have",
}

_WHY = {
    InsertError.FULL_PATH_MISSING: "the blocks of the window are not in the tree",
    InsertError.PREFIX_MISSING: "a block in front of the stored ones is not in the tree",
    InsertError.STALE_GENERATION: "the cache was reset while the blocks were stored",
    InsertError.BUSY: f"the index was locked for {_BUSY_TIMEOUT_S} s",
}
