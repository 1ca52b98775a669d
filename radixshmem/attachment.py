"""One attach of a client to a pair of regions: index, leftovers to release, event cursor, SlotStore."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import numpy as np

from radixshmem.arrays import U64Array, as_integer
from radixshmem.errors import RadixError, RegionRetired
from radixshmem.geometry import ComponentType, PublishedGeometry
from radixshmem.index import Index
from radixshmem.lease import Lease
from radixshmem.records import Event
from radixshmem.region import open_index
from radixshmem.store import SlotStore

_EVENTS_PER_READ = 4096


class Attachment:
    """Everything that lives and dies with one attach.  Safe to use from several threads."""

    def __init__(self, name: str, label: str, rank: int) -> None:
        """Join the READY index ``name``, on the node of this ``rank``.

        Raises FileNotFoundError, ServerNotReady, RegionRetired, CorruptRegion, RadixError.
        """
        fd = open_index(name)
        try:
            self.index = Index(fd, label or default_label())
        finally:
            os.close(fd)
        config = self.index.info.config
        self.geometry: PublishedGeometry = config.geometry
        full_mask = sum(1 << pool.component for pool in config.geometry.pools)
        self.masks = frozenset(mask for mask in range(1, full_mask + 1) if not mask & ~full_mask)
        self.match = self.index.match
        self.epoch = config.epoch
        self.has_events = config.event_capacity > 0
        self.lease = Lease(self.index, rank)
        self._store: SlotStore | None = None
        self._store_lock = threading.Lock()
        self._cursor = self.index.event_head()
        self._cursor_lock = threading.Lock()

    def store(self) -> SlotStore:
        """The SlotStore of the same epoch, mapped on first use; RadixError for an index-only server."""
        with self._store_lock:
            if self._store is None:
                self._store = self._attach_store()
            return self._store

    def _attach_store(self) -> SlotStore:
        config = self.index.info.config
        if not config.data_name:
            raise RadixError("an index-only server (without --data-bytes) has no SlotStore")
        self.index.check_alive()
        # A READY index had a READY SlotStore before it: there is nothing to wait for.
        store = SlotStore.attach(config.data_name, config.hugepage_path, timeout_ms=0)
        if store.epoch != self.epoch:
            store.close()
            raise RegionRetired(f"the SlotStore {config.data_name} belongs to a newer index: reattach")
        return store

    def close(self) -> None:
        """Leave the index, which gives back all pins and staged slots, and drop the mapping."""
        self.index.close()
        with self._store_lock:
            if self._store is not None:
                self._store.close()

    # -- events -----------------------------------------------------------------------------------

    def seek_events_to_head(self) -> None:
        """Let ``drain_removed`` begin with the events from now on."""
        with self._cursor_lock:
            self._cursor = self.index.event_head()

    def drain_removed(self, max_hashes: int) -> tuple[U64Array, bool]:
        """(uint64 hashes of FULL blocks removed since the last call, whether some were lost)."""
        parts: list[U64Array] = []
        num, lost = 0, False
        with self._cursor_lock:
            while self.has_events and num < max_hashes:
                before = self._cursor
                self._cursor, hashes, overflow = self.index.removed_hashes(
                    before, min(_EVENTS_PER_READ, max_hashes - num)
                )
                lost |= overflow
                if self._cursor == before:
                    break
                parts.append(hashes)
                num += len(hashes)
        return np.concatenate(parts) if parts else np.empty(0, np.uint64), lost

    def read_events(self, cursor: int) -> tuple[int, list[Event], bool]:
        """(cursor behind them, all events from ``cursor`` up to now, whether some were lost)."""
        events: list[Event] = []
        lost = False
        while self.has_events:
            before = cursor
            cursor, more, overflow = self.index.events(before, _EVENTS_PER_READ)
            lost |= overflow
            events += more
            if len(more) < _EVENTS_PER_READ:
                break
        return cursor, events, lost


def default_label() -> str:
    """How this process shows in the client table."""
    return os.path.basename(sys.argv[0] if sys.argv else "") or "python"


def component_of(value: int, geometry: PublishedGeometry) -> ComponentType:
    """``value`` as a component that the geometry has; ValueError or TypeError naming it otherwise."""
    with contextlib.suppress(ValueError):
        component = ComponentType(as_integer(value, "component"))
        if geometry.pool(component) is not None:
            return component
    raise ValueError(f"component: the geometry has no pool for {value!r}")
