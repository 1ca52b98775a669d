"""Follows the event ring as fast as several writers fill it, and keeps the balance of every block."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from radixshmem import ComponentType, EventKind
from radixshmem._native import ffi, lib
from radixshmem.index import Index

_EVENT = np.dtype(
    {
        "names": ["number", "hash", "kind", "component"],
        "formats": [np.uint64, np.uint64, np.uint16, np.uint16],
        "offsets": [ffi.offsetof("rs_event", name) for name in ("number", "hash", "kind", "component")],
        "itemsize": ffi.sizeof("rs_event"),
    }
)
_MAX_EVENTS = 1 << 16
_COMPACT_EVENTS = 1 << 19


class LostEventsError(AssertionError):
    pass


class Tape:
    """All events from number 0 on."""

    def __init__(self, index: Index) -> None:
        self.num_stored = self.num_removed = self.num_cleared = 0
        self._index = index
        self._out = ffi.new("rs_event[]", _MAX_EVENTS)
        self._events = np.frombuffer(ffi.buffer(self._out), _EVENT)
        self._cursor = ffi.new("uint64_t *", 0)
        # Changes by component: arrays of hashes and of +1 or -1.
        self._changes: dict[ComponentType, list[tuple[np.ndarray, np.ndarray]]] = {
            c: [] for c in ComponentType
        }
        self._last = time.monotonic()

    def follow(self) -> None:
        """Read up to the head as it was at some time during this call."""
        num, overflow = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        while True:
            first = self._cursor[0]
            code = lib.rs_events(self._index._live(), self._cursor, self._out, _MAX_EVENTS, num, overflow)
            assert code == 0
            if overflow[0]:
                head = self._index.event_head()
                raise LostEventsError(
                    f"events were lost: asked for {first}, got {num[0]}, now at {self._cursor[0]} of {head}; "
                    f"{time.monotonic() - self._last:.1f} s since the last look"
                )
            self._last = time.monotonic()
            events = self._events[: num[0]]
            assert np.array_equal(events["number"], np.arange(first, first + len(events), dtype=np.uint64))
            self._note(events)
            if len(events) < _MAX_EVENTS:
                return

    def _note(self, events: np.ndarray) -> None:
        stored, removed = events["kind"] == EventKind.STORED, events["kind"] == EventKind.REMOVED
        self.num_stored += int(stored.sum())
        self.num_removed += int(removed.sum())
        self.num_cleared += int((events["kind"] == EventKind.CLEARED).sum())
        for component, changes in self._changes.items():
            chosen = (stored | removed) & (events["component"] == component)
            changes.append((events["hash"][chosen], np.where(stored[chosen], 1, -1)))
            if sum(len(sign) for _, sign in changes) > _COMPACT_EVENTS:
                changes[:] = [_sum_up(changes)]

    def balance(self) -> Counter[tuple[ComponentType, int]]:
        """Stored less removed, of every block of every component."""
        total: Counter[tuple[ComponentType, int]] = Counter()
        for component, changes in self._changes.items():
            hashes, balance = _sum_up(changes)
            total.update({(component, int(h)): int(b) for h, b in zip(hashes, balance, strict=True)})
        return total


def _sum_up(changes: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(hashes whose changes do not cancel out, the sum of each)."""
    if not changes:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    hashes, signs = (np.concatenate(parts) for parts in zip(*changes, strict=True))
    unique, where = np.unique(hashes, return_inverse=True)
    balance = np.bincount(where, weights=signs, minlength=len(unique)).astype(np.int64)
    return unique[balance != 0], balance[balance != 0]
