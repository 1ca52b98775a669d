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
_COMPACT_EVENTS = 1 << 20


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
        # Changes not summed up yet: (component, hash, +1 or -1) as three arrays.
        self._changes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_changes = 0
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
        change = stored | removed
        sign = np.where(stored, 1, -1)[change]
        self._changes.append((events["component"][change], events["hash"][change], sign))
        self._num_changes += len(sign)
        if self._num_changes > _COMPACT_EVENTS:
            self._compact()

    def _compact(self) -> None:
        component, value, sign = (np.concatenate(parts) for parts in zip(*self._changes, strict=True))
        keys = np.empty(len(value), [("component", np.uint16), ("hash", np.uint64)])
        keys["component"], keys["hash"] = component, value
        unique, where = np.unique(keys, return_inverse=True)
        balance = np.bincount(where, weights=sign).astype(np.int64)
        kept = balance != 0
        self._changes = [(unique["component"][kept], unique["hash"][kept], balance[kept])]
        self._num_changes = int(kept.sum())

    def balance(self) -> Counter[tuple[ComponentType, int]]:
        """Stored less removed, of every block of every component."""
        self._compact()
        component, value, balance = self._changes[0]
        return Counter(
            {
                (ComponentType(int(c)), int(v)): int(b)
                for c, v, b in zip(component, value, balance, strict=True)
            }
        )
