"""The binding of an attached index: each method is one verb of the C core, no policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NewType, cast

import numpy as np

from radixshmem._native import (
    EVENT_DTYPE,
    I32,
    U64,
    c_string,
    check,
    event_from_c,
    ffi,
    info_from_c,
    lib,
    node_from_c,
    raise_for,
    struct_to_dict,
)
from radixshmem.arrays import I32Array, U64Array
from radixshmem.errors import ClientClosed
from radixshmem.geometry import ComponentType
from radixshmem.records import Event, EventReason, Node, ReapResult, RegionInfo, SnapshotSummary

QUERY_LOCK: int = lib.RS_QUERY_LOCK
QUERY_NO_META: int = lib.RS_QUERY_NO_META
QUERY_PROBE: int = lib.RS_QUERY_PROBE
INSERT_KEEP_UNUSED: int = lib.RS_INSERT_KEEP_UNUSED
_EBUSY: int = lib.RS_EBUSY
_MASK_SWA: int = lib.RS_MASK_SWA
_from_buffer, _new, _NULL = ffi.from_buffer, ffi.new, ffi.NULL
_rs_match, _rs_release = lib.rs_match, lib.rs_release
_new_unset = ffi.new_allocator(should_clear_after_alloc=False)
_MATCH_RESULT = ffi.typeof("rs_match_result *")
_ignored = _new("uint32_t *")  # an out-parameter that nobody reads, written by any thread

Pin = NewType("Pin", object)
"""What keeps a match: the rs_match_result that it came with."""


class Match:
    """What a walk found, read from the C result when asked for."""

    __slots__ = ("_out", "_pin", "_slots", "_swa")

    _out: Any
    _slots: Any
    _swa: Any
    _pin: Pin | None

    @property
    def status(self) -> int:
        """0 OK, else BUSY or PIN_LIMIT with a zero hit (``QueryStatus``)."""
        return int(self._out.status)

    @property
    def full_hit(self) -> int:
        """Blocks that FULL can serve."""
        return int(self._out.full_hit)

    @property
    def common_hit(self) -> int:
        """Blocks that every component of the mask can serve; what the pin keeps."""
        return int(self._out.common_hit)

    @property
    def swa_start(self) -> int:
        """First block of the SWA window."""
        return int(self._out.swa_start)

    @property
    def swa_slots(self) -> I32Array:
        """SWA slots of blocks ``swa_start`` .. ``common_hit`` - 1; empty without SWA in the mask."""
        return _to_array(self._swa, self._out.num_swa)

    @property
    def mamba_slots(self) -> I32Array:
        """The MAMBA slot of block ``common_hit`` - 1, or empty."""
        slot = self._out.mamba_slot
        return np.array([slot] if slot >= 0 else [], np.int32)

    def common_slots(self) -> I32Array:
        """FULL slots of the first ``common_hit`` blocks."""
        return _to_array(self._slots, self._out.common_hit)

    def holds_pin(self) -> bool:
        """Whether a pin was taken and not released through this object."""
        return self._pin is not None and bool(self._out.pin.valid)


def _to_array(slots: Any, num: int) -> I32Array:
    """The first ``num`` of an int32_t[] without a copy; the array keeps them alive."""
    return np.frombuffer(ffi.buffer(slots, num * 4), np.int32) if num else np.empty(0, np.int32)


class Index:
    """One attach to a READY index.  Verbs may be called from several threads.

    Guarantees: the C handle is detached once the last verb in flight has returned, because every
    verb keeps its own reference to it; ``close`` only drops this object's.
    """

    __slots__ = ("__weakref__", "_handle", "_swa_window", "info", "slot")

    def __init__(self, fd: int, label: str) -> None:
        """Attach to the index open as ``fd``, which stays the caller's."""
        out = _new("rs_client **")
        check(lib.rs_attach(fd, label.encode()[: lib.RS_LABEL_BYTES - 1], out), "attach")
        self._handle: Any = ffi.gc(out[0], lib.rs_detach)
        self.info = self.read_info()
        self.slot = int(lib.rs_client_slot(self._handle))
        swa = self.info.config.geometry.pool(ComponentType.SWA)
        self._swa_window = swa.window_blocks if swa else 0

    def close(self) -> None:
        """Give back every pin and staged slot and leave.  A second call does nothing."""
        self._handle = None

    @property
    def closed(self) -> bool:
        return self._handle is None

    def _live(self) -> Any:
        """The handle of a region that still serves."""
        handle = self._handle
        if handle is None:
            raise ClientClosed("the client is closed")
        code = lib.rs_alive(handle)
        if code:
            raise_for(code, "index")
        return handle

    def match(self, hashes: U64Array, mask: int, flags: int, result: Match) -> None:
        """Walk ``hashes`` into ``result``; with QUERY_LOCK what was matched is pinned.

        The hot path of the package: a name bound at import and a test left out count here.
        """
        handle = self._handle
        if handle is None:
            raise ClientClosed("the client is closed")
        num = len(hashes)
        result._out = out = _new(_MATCH_RESULT)
        result._slots = slots = _new_unset(I32, num)
        result._swa = swa = _new_unset(I32, self._swa_window) if mask & _MASK_SWA else _NULL
        code = _rs_match(handle, _from_buffer(U64, hashes), num, mask, flags, out, slots, swa)
        if code:
            raise_for(code, "query")
        if flags & QUERY_LOCK:
            result._pin = out

    def release(self, pin: Pin) -> bool:
        """Drop ``pin``; False when the index was busy and the pin is still held.

        A pin that is not held any more, or whose index was left or retired, needs no release: True.
        """
        handle, match_result = self._handle, cast(Any, pin)
        if handle is None:
            return True
        return _rs_release(handle, match_result.pin, _ignored) != _EBUSY  # type: ignore[no-any-return]

    def allocate(self, component: int, num: int) -> tuple[I32Array, bool]:
        """(staged slots, whether the index was busy before all were tried)."""
        slots: I32Array = np.empty(num, np.int32)
        got = _new("uint32_t *")
        code = lib.rs_allocate(self._live(), component, num, _from_buffer(I32, slots), got)
        if code != _EBUSY:
            check(code, "allocate_slots")
        return slots[: got[0]], code == _EBUSY

    def insert(
        self, component: int, hashes: U64Array, slots: I32Array, start: int, flags: int
    ) -> tuple[int, int, I32Array]:
        """(RS_INSERT_* error, num_inserted, unused slots)."""
        handle = self._live()
        unused: I32Array = np.empty(len(slots), np.int32)
        out = _new("rs_insert_result *")
        code = lib.rs_insert(
            handle,
            component,
            _from_buffer(U64, hashes),
            len(hashes),
            _from_buffer(I32, slots),
            len(slots),
            start,
            flags,
            out,
            _from_buffer(I32, unused),
        )
        if code:
            raise_for(code, "insert")
        return out.error, out.num_inserted, unused[: out.num_unused]

    def recycle(self, component: int, slots: I32Array) -> int:
        """Give staged slots back; returns how many went (fewer when the index was busy)."""
        handle, num_done = self._live(), _new("uint32_t *")
        code = lib.rs_recycle(handle, component, _from_buffer(I32, slots), len(slots), num_done)
        if code == _EBUSY:
            return int(num_done[0])
        check(code, "recycle_slots")
        return len(slots)

    def reset(self) -> None:
        """Forget everything published; IndexBusy when it could not be done now."""
        check(lib.rs_reset(self._live()), "reset")

    def evict(self, component: int, num: int, reason: EventReason) -> int:
        """Evict up to ``num`` blocks (FULL) or slots (side pools); returns how many went."""
        out = _new("uint32_t *")
        code = lib.rs_evict(self._live(), component, num, reason, out)
        if code != _EBUSY:
            check(code, "evict")
        return int(out[0])

    # -- life and death ---------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise RegionRetired, CorruptRegion, ClientClosed or, after a fork, RadixError."""
        self._live()

    def verify_file(self) -> None:
        """Raise CorruptRegion when the file behind the mapping lost part of its size."""
        check(lib.rs_verify_file(self._live()), "index")

    def reap(self) -> ReapResult:
        """Give back what dead clients hold; what a busy index leaves is for the next call."""
        out = _new("rs_reap_result *")
        return self._reaped(lib.rs_reap(self._live(), out), out)

    def reap_if_due(self, min_interval_s: float) -> ReapResult:
        """``reap``, but only if nobody did within ``min_interval_s``."""
        out = _new("rs_reap_result *")
        return self._reaped(lib.rs_reap_if_due(self._live(), round(min_interval_s * 1e9), out), out)

    @staticmethod
    def _reaped(code: int, out: Any) -> ReapResult:
        if code != _EBUSY:
            check(code, "reap")
        return ReapResult(out.clients, out.pins, out.slots, out.dying)

    def lease_fd(self) -> int:
        """Whoever holds a dup of this fd keeps the client's lease; it belongs to the handle."""
        return int(lib.rs_lease_fd(self._live()))

    def set_device(self) -> None:
        """Say that a device may write this client's slots even after its death."""
        check(lib.rs_set_device(self._live()), "set_device")

    def set_fingerprint(self, fingerprint: str) -> None:
        """Store ``fingerprint`` if none is there; ValueError when another one is."""
        check(lib.rs_set_fingerprint(self._live(), fingerprint.encode()), "fingerprint")

    # -- looking inside ---------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Number of this attach among all attaches to the region."""
        return int(lib.rs_client_incarnation(self._live()))

    def read_info(self) -> RegionInfo:
        """The header as it is now."""
        out = _new("rs_info *")
        check(lib.rs_get_info(self._live(), out), "index")
        return info_from_c(out)

    def stats(self) -> dict[str, Any]:
        """``rs_stats`` as nested dicts and lists; per-component lists in the order FULL, SWA, MAMBA."""
        out = _new("rs_stats *")
        check(lib.rs_get_stats(self._live(), out), "stats")
        return struct_to_dict(out[0])

    def num_free(self, component: int) -> int:
        """FREE slots of ``component``."""
        out = _new("rs_stats *")
        check(lib.rs_get_stats(self._live(), out), "stats")
        return int(out.pool[component].num_free)

    def event_head(self) -> int:
        """Number of the next event."""
        return int(lib.rs_event_head(self._live()))

    def events(self, cursor: int, max_events: int) -> tuple[int, list[Event], bool]:
        """(cursor after them, events from ``cursor`` on, True when some were lost)."""
        out = _new("rs_event[]", max_events)
        position, num, overflow = _new("uint64_t *", cursor), _new("uint32_t *"), _new("uint32_t *")
        check(lib.rs_events(self._live(), position, out, max_events, num, overflow), "events")
        return int(position[0]), [event_from_c(out[i]) for i in range(num[0])], bool(overflow[0])

    def removed_hashes(self, cursor: int, max_events: int) -> tuple[int, U64Array, bool]:
        """Like ``events``, but only the hashes of removed FULL blocks, uint64 [m]."""
        out = _new("rs_event[]", max_events)
        position, num, overflow = _new("uint64_t *", cursor), _new("uint32_t *"), _new("uint32_t *")
        check(lib.rs_events(self._live(), position, out, max_events, num, overflow), "events")
        read = np.frombuffer(ffi.buffer(out), EVENT_DTYPE, num[0])
        wanted = (read["kind"] == lib.RS_EVENT_REMOVED) & (read["component"] == lib.RS_FULL)
        return int(position[0]), read["hash"][wanted], bool(overflow[0])

    def snapshot(self) -> Snapshot:
        """A copy of the index taken under the lock."""
        out = _new("rs_snapshot **")
        check(lib.rs_snapshot_take(self._live(), out), "snapshot")
        return Snapshot(out[0])


class Snapshot:
    """A private copy of an index, to prove its invariants on and to list its nodes."""

    def __init__(self, handle: Any) -> None:
        self._handle = ffi.gc(handle, lib.rs_snapshot_free)

    @classmethod
    def peek(cls, fd: int) -> Snapshot:
        """Copy, unlocked, the index that nobody uses; an unfinished batch is undone in the copy."""
        out = _new("rs_snapshot **")
        check(lib.rs_snapshot_peek(fd, out), "index")
        return cls(out[0])

    def check(self) -> tuple[int, str]:
        """(number of violated invariants, a line for each of the first ones)."""
        report = _new("char[]", 1 << 16)
        num = lib.rs_snapshot_check(self._handle, report, len(report))
        check(num, "check")
        return num, c_string(report)

    def summarize(self) -> SnapshotSummary:
        out = _new("rs_snapshot_summary *")
        check(lib.rs_snapshot_summarize(self._handle, out), "snapshot")
        return SnapshotSummary(
            tuple(out.free), tuple(out.staged), tuple(out.pinned), tuple(out.evictable), out.num_pins
        )

    def nodes(self) -> Iterator[Node]:
        """PUBLISHED and STAGED FULL slots in the order of their ids."""
        out, num, first = _new("rs_node[]", 1024), _new("uint32_t *"), 0
        while True:
            check(lib.rs_snapshot_nodes(self._handle, first, out, len(out), num), "snapshot")
            if num[0] == 0:
                return
            for i in range(num[0]):
                yield node_from_c(out[i])
            first = out[num[0] - 1].slot + 1
