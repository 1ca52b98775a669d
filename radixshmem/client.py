"""RadixClient: an engine's way to the node's cache.

Hot verbs run on shared memory in this process; the control channel carries only the handshake.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixshmem.arrays import (
    UINT64,
    I32Array,
    U64Array,
    as_hashes,
    as_integer,
    as_number,
    as_slots,
    check_text,
)
from radixshmem.attachment import Attachment, component_of
from radixshmem.control.client import ControlClient
from radixshmem.errors import ClientClosed, GeometryMismatch, InsertError, RadixError, ServerNotReady
from radixshmem.geometry import COMPONENT_MASK_FULL, ComponentType, Geometry
from radixshmem.index import INSERT_KEEP_UNUSED, QUERY_LOCK, QUERY_NO_META, Index
from radixshmem.info import ServerInfo
from radixshmem.names import check_name, default_endpoint
from radixshmem.pull import PullJob, await_room
from radixshmem.query import InsertResult, QueryResult
from radixshmem.records import Event
from radixshmem.stats import name_stats
from radixshmem.store import SlotStore

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_READY_TIMEOUT_S = 600.0  # prefaulting a large SlotStore takes minutes


class RadixClient:
    """A client of the radix-server ``name``.  One client may be used from several threads.

    ``geometry``: the shapes of this client's slots, or None to take the published ones.
    ``max_outstanding``: pull jobs that may wait to be collected.  ``timeout_s``: deadline of a control
    request.  ``label``: how the client shows in ``radixctl clients``.

    Contacts the server at once: ServerUnavailable when none answers, GeometryMismatch when it serves
    another geometry, ValueError naming the flag when its budget does not fit this one, TimeoutError,
    and RadixError when it is closing.  It does not wait for readiness.  In a forked child every method
    but ``close`` raises RadixError.
    """

    def __init__(
        self,
        name: str,
        geometry: Geometry | None = None,
        *,
        endpoint: str | None = None,
        max_outstanding: int = 256,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        label: str = "",
    ) -> None:
        if geometry is not None and not isinstance(geometry, Geometry):
            raise TypeError(f"geometry must be a Geometry or None, not {type(geometry).__name__}")
        max_outstanding = as_integer(max_outstanding, "max_outstanding")
        if max_outstanding < 1:
            raise ValueError(f"max_outstanding must be at least 1, not {max_outstanding}")
        timeout_s = as_number(timeout_s, "timeout_s")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, not {timeout_s}")
        self.name = check_name(name)
        self._geometry = geometry
        self._label = check_text(label, "label")
        self._max_outstanding = max_outstanding
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._closed = False
        self._attached: Attachment | None = None
        self._lock = threading.Lock()
        self._open_jobs: set[int] = set()
        endpoint = default_endpoint(name) if endpoint is None else check_text(endpoint, "endpoint")
        self._control = ControlClient(endpoint or default_endpoint(name), timeout_s)
        try:
            self.info: ServerInfo = self._control.configure(geometry)
        except BaseException:
            self._control.close()
            raise

    # -- the server ---------------------------------------------------------------------------------

    def status(self) -> ServerInfo:
        """Ask the server what it is doing."""
        self._check_usable()
        self.info = self._control.status()
        return self.info

    def wait_ready(self, timeout_s: float = DEFAULT_READY_TIMEOUT_S) -> ServerInfo:
        """Wait until the server serves.

        TimeoutError tells its mode now; RadixError tells why configuring failed.
        """
        self._check_usable()
        self.info = self._control.wait_ready(as_number(timeout_s, "timeout_s"))
        return self.info

    @property
    def geometry(self) -> dict[str, Any] | None:
        """The published geometry with its counts, or None as long as the server has none.

        ``{"block_size", "slot_align", "register_chunk_tokens", "fingerprint", "pools": {"full":
        {"num_slots", "slot_bytes"}, "swa": {..., "window_blocks"}, "mamba": {...}}}``, only pools that
        exist; ``slot_bytes`` is the client's own size, not the stride.
        """
        attached = self._attached
        return attached.geometry.as_dict() if attached else self.info.geometry

    def rank(self) -> int:
        """This node's rank in the cluster."""
        return self.info.rank

    def world_size(self) -> int:
        """Nodes in the cluster."""
        return self.info.world_size

    def is_distributed(self) -> bool:
        """Whether there are other nodes."""
        return self.info.world_size > 1

    def block_size(self) -> int:
        """Tokens per block."""
        return self._attach().geometry.block_size

    # -- attaching ----------------------------------------------------------------------------------

    @property
    def index(self) -> Index:
        """The attached index (attaches it when no verb did so far)."""
        return self._attach().index

    def reattach(self) -> ServerInfo:
        """Follow a server that made its regions anew; does nothing while the old ones serve.

        Old pins, staged slots and views are of the old regions.  Raises GeometryMismatch when the new
        geometry is another one, and what the constructor and ``wait_ready`` raise.
        """
        self._check_usable()
        old = self._attached
        self._control.configure(self._geometry or (old.geometry.as_geometry() if old else None))
        self.info = self._control.wait_ready(self._timeout_s)
        with self._lock:
            self._check_usable()
            old = self._attached
            if old is None or old.epoch.hex() != self.info.epoch:
                self._attached = self._join()
                if old is not None:
                    old.close()
        return self.info

    def _attach(self) -> Attachment:
        attached = self._attached
        if attached is not None:
            return attached
        with self._lock:
            self._check_usable()
            if self._attached is None:
                self._attached = self._join()
            return self._attached

    def _join(self) -> Attachment:
        try:
            attached = Attachment(self.name, self._label, self.info.rank)
        except FileNotFoundError:
            raise ServerNotReady(f"radix-server {self.name} has no regions yet: call wait_ready()") from None
        if self._geometry is not None:
            try:
                attached.geometry.check_shapes(self._geometry)
            except GeometryMismatch:
                attached.close()
                raise
        return attached

    def _check_usable(self) -> None:
        if self._closed:
            raise ClientClosed(f"the client of {self.name} is closed")
        if os.getpid() != self._pid:
            raise RadixError(
                f"this client of {self.name} belongs to process {self._pid}, which forked this one: "
                "make a new client here"
            )

    # -- verbs --------------------------------------------------------------------------------------

    def query(
        self,
        hashes: NDArray[np.uint64],
        *,
        mask: int = COMPONENT_MASK_FULL,
        local_only: bool = True,
        lock: bool = False,
        update_meta: bool = True,
    ) -> QueryResult:
        """Longest published prefix of ``hashes`` (uint64 [n]).

        ``mask``: components that have to serve it (COMPONENT_MASK_*; FULL always does).  ``lock``: pin
        it until ``finalize``; without, its slots are hints.  ``update_meta``: let it count as a use.
        ``local_only``: peers are never asked here; see ``pull_async``.
        """
        attached = self._attached or self._attach()
        lease = attached.lease
        if lease.queue:
            lease.drain()
        if type(mask) is not int:
            mask = as_integer(mask, "mask")
        if mask not in attached.masks:
            raise ValueError(f"mask: {mask} is not made of components that the geometry has")
        if type(hashes) is not np.ndarray or hashes.dtype is not UINT64 or hashes.ndim != 1:
            hashes = as_hashes(hashes)
        result = QueryResult(lease, lock)
        flags = (QUERY_LOCK if lock else 0) | (0 if update_meta else QUERY_NO_META)
        try:
            attached.match(hashes, mask, flags, result)
        except ValueError:
            as_hashes(hashes)  # says what is wrong with them, if anything
            raise
        return result

    def allocate_slots(self, n: int, *, component: ComponentType = ComponentType.FULL) -> I32Array:
        """Stage ``n`` slots, evicting unpinned blocks as needed; returns int32 slot ids.

        FULL may come back shorter, side pools give all or none.  ValueError when ``n`` is negative or
        more than the pool has.
        """
        attached = self._begin()
        n = as_integer(n, "n")
        pool = attached.geometry.pool(component_of(component, attached.geometry))
        if pool is None or not 0 <= n <= pool.num_slots:
            raise ValueError(f"n: {n} is not in [0, {pool.num_slots if pool else 0}], the size of the pool")
        slots, was_busy = attached.index.allocate(component, n)
        if was_busy and component != ComponentType.FULL:  # all or none: the core could not give these back
            attached.lease.recycle(component, slots)
            return slots[:0]
        return slots

    def insert(
        self,
        hashes: NDArray[np.uint64],
        slots: NDArray[np.int32],
        *,
        start: int = 0,
        auto_recycle: bool = True,
        component: ComponentType = ComponentType.FULL,
    ) -> InsertResult:
        """Publish staged ``slots`` (int32 [m]) for the path ``hashes`` (uint64 [n]).

        FULL: ``slots[i]`` holds block ``start + i``, and m = n - start.  Side components: right-aligned
        at the end of ``hashes``, m <= n, and ``start`` must be 0.  ``auto_recycle``: give the slots back
        that did not enter the tree.  No slots are OK, whatever is published.  ValueError, and nothing
        changed, for other lengths and for slots that are named twice or are not this client's.
        """
        attached = self._begin()
        component = component_of(component, attached.geometry)
        hashes, slots, start = as_hashes(hashes), as_slots(slots), as_integer(start, "start")
        _check_insert(len(hashes), len(slots), start, component)
        flags = 0 if auto_recycle else INSERT_KEEP_UNUSED
        error, num_inserted, unused = attached.index.insert(component, hashes, slots, start, flags)
        return InsertResult(InsertError(error), unused, num_inserted)

    def recycle_slots(
        self, slots: NDArray[np.int32], *, component: ComponentType = ComponentType.FULL
    ) -> None:
        """Give staged ``slots`` (int32 [m]) back.

        ValueError, and nothing changed, when one is named twice or is not this client's.  What a busy
        index leaves stays staged and goes with the next verb.
        """
        attached = self._begin()
        attached.lease.recycle(component_of(component, attached.geometry), as_slots(slots))

    def reset(self) -> None:
        """Forget everything published.  Pinned and staged slots keep their bytes until released.

        IndexBusy when it could not be done now: the index lock was not free, or pins and staged slots from
        before 127 earlier resets are still held.
        """
        self._begin().index.reset()

    def flush(self) -> None:
        """Publish routing to the cluster now; there is nothing to do on one node."""
        self._begin().index.check_alive()

    def pull_async(
        self,
        hashes: NDArray[np.uint64],
        mask: int = COMPONENT_MASK_FULL,
        *,
        lock: bool = False,
        timeout_ms: int = 5000,
        block: bool = True,
    ) -> PullJob:
        """Bring the prefix ``hashes`` into the local store from whichever peer has it.

        On one node the job is done at once with the local hit.  TimeoutError when ``max_outstanding``
        jobs wait to be collected: after ``timeout_ms``, or at once unless ``block``.
        """
        self._check_usable()
        timeout_s = as_number(timeout_ms, "timeout_ms") / 1000
        await_room(self._open_jobs, self._max_outstanding, timeout_s, block)
        return PullJob(self.query(hashes, mask=mask, lock=lock), self._open_jobs)

    def _begin(self) -> Attachment:
        attached = self._attached or self._attach()
        if attached.lease.queue:
            attached.lease.drain()
        return attached

    # -- counts -------------------------------------------------------------------------------------

    def mempool_total(self) -> int:
        """FULL slots."""
        return self._num_slots(ComponentType.FULL)

    def mempool_free(self) -> int:
        """FULL slots that are neither staged nor published."""
        return self._num_free(ComponentType.FULL)

    def swa_mempool_total(self) -> int:
        """SWA slots."""
        return self._num_slots(ComponentType.SWA)

    def swa_mempool_free(self) -> int:
        """SWA slots that are neither staged nor published."""
        return self._num_free(ComponentType.SWA)

    def mamba_mempool_total(self) -> int:
        """MAMBA slots."""
        return self._num_slots(ComponentType.MAMBA)

    def mamba_mempool_free(self) -> int:
        """MAMBA slots that are neither staged nor published."""
        return self._num_free(ComponentType.MAMBA)

    def stats(self) -> dict[str, Any]:
        """Counters of the whole region since it was made; per-component values by pool name."""
        return name_stats(self._begin().index.stats())

    def _num_slots(self, component: ComponentType) -> int:
        attached = self._begin()
        attached.index.check_alive()
        pool = attached.geometry.pool(component)
        return pool.num_slots if pool else 0

    def _num_free(self, component: ComponentType) -> int:
        return self._begin().index.num_free(component)

    # -- events -------------------------------------------------------------------------------------

    @property
    def kvevent_enabled(self) -> bool:
        """Whether the server keeps events (``--kvevent-ring-capacity``)."""
        return self._attach().has_events

    def kvevent_seek_to_head(self) -> None:
        """Skip what ``kvevent_drain`` has not returned so far."""
        self._begin().seek_events_to_head()

    def kvevent_drain(self, max_hashes: int) -> tuple[U64Array, bool]:
        """(uint64 hashes of FULL blocks removed since the last call, whether some were lost).

        Begins when this client attached; at most ``max_hashes`` a call.
        """
        max_hashes = as_integer(max_hashes, "max_hashes")
        if max_hashes < 0:
            raise ValueError(f"max_hashes must not be negative, is {max_hashes}")
        return self._begin().drain_removed(max_hashes)

    def events(self, cursor: int) -> tuple[int, list[Event], bool]:
        """(cursor for the next call, events numbered ``cursor`` and up, whether some were lost)."""
        cursor = as_integer(cursor, "cursor")
        if not 0 <= cursor < 1 << 64:
            raise ValueError(f"cursor: {cursor} is not in [0, 2**64)")
        return self._begin().read_events(cursor)

    # -- data ---------------------------------------------------------------------------------------

    @property
    def store(self) -> SlotStore:
        """The SlotStore, mapped on first use; RadixError when the server keeps an index only."""
        self._check_usable()
        return self._attach().store()

    def slot_view(self, slot: int, component: ComponentType = ComponentType.FULL) -> memoryview:
        """Writable bytes of a slot, one stride long."""
        return self.store.slot_view(slot, component)

    # -- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back all pins and staged slots and leave.  A second call does nothing."""
        if os.getpid() != self._pid:  # locks and the channel's threads are as the fork found them
            self._closed, self._attached = True, None
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()
        self._control.close()

    def __enter__(self) -> RadixClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_insert(num_hashes: int, num_slots: int, start: int, component: ComponentType) -> None:
    if component != ComponentType.FULL:
        if start != 0:
            raise ValueError(f"start must be 0 for {component.name}, is {start}")
        if num_slots > num_hashes:
            raise ValueError(f"slots: {num_slots} are more than the {num_hashes} hashes")
    elif not 0 <= start <= num_hashes:
        raise ValueError(f"start: {start} is not in [0, {num_hashes}], the number of hashes")
    elif num_slots != num_hashes - start:
        raise ValueError(f"slots: {num_slots} given for {num_hashes - start} hashes from start {start} on")
