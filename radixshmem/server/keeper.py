"""Keeps the regions of a server: adopts or makes them, and says what became of them.

Guarantees: at most one geometry is accepted at a time; whoever brings the same one gets the same
answer, whoever brings another one is refused.  After a failure the next geometry starts afresh, and
nothing of the failed attempt is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from typing import Any

from radixshmem.config import ServerConfig
from radixshmem.errors import CorruptRegion, RadixError
from radixshmem.geometry import Geometry, PublishedGeometry, check_same_geometry
from radixshmem.index import Index
from radixshmem.info import ServerInfo
from radixshmem.prefault import Progress
from radixshmem.records import RegionConfig
from radixshmem.region import Access, open_object
from radixshmem.server.builder import build_regions, grant_access, plan_regions
from radixshmem.server.exits import describe
from radixshmem.server.leftovers import (
    Adopt,
    Discard,
    discard_leftovers,
    drop_regions,
    inspect_leftovers,
    kept_settings,
)
from radixshmem.server.machine import Machine
from radixshmem.server.preflight import Need, check_space
from radixshmem.server.progress import ProgressView, progress_view
from radixshmem.server.state import ServerState
from radixshmem.server.upkeep import look_up
from radixshmem.sizes import format_size
from radixshmem.stats import name_stats

log = logging.getLogger(__name__)


class _ClosingError(RadixError):
    """Making regions was given up because the server closes."""


class RegionKeeper:
    """The regions of one server.  Methods may be called from several threads at once."""

    def __init__(
        self, config: ServerConfig, state: ServerState, machine: Machine, access: Access, show_progress: bool
    ) -> None:
        self._config = config
        self._state = state
        self._machine = machine
        self._access = access
        self._show_progress = show_progress
        self._lock = threading.Lock()  # guards _published, _builder and the changes of index
        self._published: PublishedGeometry | None = None
        self._is_adopted = False  # then a geometry's zeroes mean what the regions were made with
        self._builder: threading.Thread | None = None
        self._last_stats: dict[str, Any] = {}
        self._store_fd = -1  # keeps the SlotStore at hand, to see whether it is still whole
        self._store_bytes = 0
        self.index: Index | None = None
        self.prefault_s = 0.0
        self.num_unfingerprinted = 0

    # -- leftovers --------------------------------------------------------------------------------

    def settle_leftovers(self) -> Adopt | None:
        """Join what an earlier server left, or discard it.  Space is checked before anything is discarded."""
        leftovers = inspect_leftovers(self._config)
        if isinstance(leftovers, Adopt):
            self.index = leftovers.index
            return leftovers
        reusable = leftovers.num_bytes if isinstance(leftovers, Discard) else 0
        if not self._config.hugepage_path:  # huge pages are checked when the exact size is known
            check_space(Need(self._config.data_bytes, reusable_bytes=reusable), self._config, self._machine)
        if isinstance(leftovers, Discard):
            discard_leftovers(self._config, leftovers)
        return None

    def serve_adopted(self, adopted: Adopt) -> None:
        """Publish the regions that ``settle_leftovers`` joined."""
        with self._lock:
            self._is_adopted = True
            self._state.update(mode="configuring")
            grant_access(adopted.info.config, self._config.name, self._access)
            self._publish(adopted.index)
        for kept in kept_settings(self._config, adopted.info):
            log.warning("the adopted regions keep %s; --fresh makes them anew", kept)
        num_blocks = self.stats()["pool"]["full"]["num_published"]
        log.info("adopted the regions of an earlier server with %d blocks", num_blocks)

    # -- configure --------------------------------------------------------------------------------

    def configure(self, geometry: Geometry | None) -> ServerInfo:
        """Accept a client's geometry and start making regions for it, if it is the first one.

        Raises GeometryMismatch, ValueError naming the flag or field, NoSpace, and RadixError when
        the server is closing.
        """
        with self._lock:
            if self._state.info.mode == "closing":
                raise RadixError(f"radix-server {self._config.name} is closing")
            if geometry is not None:
                self._check_fingerprint_given(geometry)
                if self._published is None:
                    self._accept(geometry)
                else:
                    self._compare(self._published, geometry)
            return self._state.info

    def _check_fingerprint_given(self, geometry: Geometry) -> None:
        if geometry.fingerprint:
            return
        if self._config.require_fingerprint:
            raise ValueError(
                "fingerprint is empty, and the server was started with --require-fingerprint: "
                "say in Geometry.fingerprint what the bytes mean"
            )
        self.num_unfingerprinted += 1
        log.warning("a client brought a geometry without a fingerprint: nothing proves that its bytes fit")

    def _accept(self, geometry: Geometry) -> None:
        try:
            plan = plan_regions(self._config, geometry, self._machine)
        except ValueError as error:
            log.warning("a client's geometry was refused: %s", error)
            raise
        except RadixError as error:
            self._give_up(error)
            raise
        self._published, self._is_adopted = plan.geometry, False
        self._state.update(
            mode="configuring",
            last_error="",
            progress=0.0,
            geometry=plan.geometry.as_dict(),
            hugepage_path=plan.hugepage_path,
        )
        self._builder = threading.Thread(target=self._build, args=(plan,), name="builder")
        self._builder.start()

    def _compare(self, published: PublishedGeometry, geometry: Geometry) -> None:
        if self._is_adopted:
            published.check_shapes(geometry)
        else:
            check_same_geometry(
                published,
                geometry,
                slot_align=self._config.slot_align,
                register_chunk_tokens=self._config.register_chunk_tokens,
            )
        if geometry.fingerprint and not published.fingerprint:
            if self.index is not None:
                self.index.set_fingerprint(geometry.fingerprint)
            self._published = replace(published, fingerprint=geometry.fingerprint)
            self._state.update(geometry=self._published.as_dict())

    # -- making regions ---------------------------------------------------------------------------

    def _build(self, plan: RegionConfig) -> None:
        start = time.monotonic()
        try:
            with progress_view("making the regions", self._show_progress) as view:
                index = build_regions(self._config, plan, self._access, self._machine, self._reporter(view))
        except _ClosingError:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, clients are told and the server lives on
            with self._lock:
                self._give_up(error)
            return
        self.prefault_s = time.monotonic() - start
        try:
            with self._lock:
                self._publish(index)
        except Exception as error:  # noqa: BLE001 - as above, but now there are regions to remove
            self.fail(error)
            return
        log.info("made the regions in %.1f s", self.prefault_s)

    def _reporter(self, view: ProgressView) -> Progress:
        def advance(done_bytes: int, total_bytes: int) -> None:
            if self._state.info.mode == "closing":
                raise _ClosingError("the server is closing")
            view.advance(done_bytes, total_bytes)
            progress = round(done_bytes / total_bytes, 2)  # a change wakes every waiting client
            if progress != self._state.info.progress:
                self._state.update(progress=progress)

        return advance

    def _publish(self, index: Index) -> None:
        """Serve from ``index``.  A fingerprint that came while it was made goes into it."""
        self.index = index
        config = index.info.config
        if self._published and self._published.fingerprint != config.geometry.fingerprint:
            index.set_fingerprint(self._published.fingerprint)
        else:
            self._published = config.geometry
        if config.data_bytes:
            self._store_fd = open_object(config.data_name, config.hugepage_path, own=True)
            self._store_bytes = os.fstat(self._store_fd).st_size
        self._state.update(
            mode="ready",
            progress=1.0,
            geometry=self._published.as_dict(),
            epoch=config.epoch.hex(),
            hugepage_path=config.hugepage_path,
        )
        pools = (f"{p.component.name} {p.num_slots} x {p.stride} bytes" for p in self._published.pools)
        log.info("ready: %s, epoch %s", ", ".join(pools), config.epoch.hex())

    def _give_up(self, error: Exception) -> None:
        self._published = None
        text = describe(error) or type(error).__name__
        self._state.update(mode="failed", last_error=text, geometry=None, progress=0.0, epoch="")
        log.error(
            "no regions to serve from: %s", text, exc_info=None if isinstance(error, RadixError) else error
        )

    # -- serving ----------------------------------------------------------------------------------

    def verify_files(self) -> None:
        """Raise CorruptRegion when somebody truncated the regions: touching what is gone would be SIGBUS."""
        with self._lock:
            if self.index is None:
                return
            self.index.verify_file()
            if self._store_fd >= 0 and os.fstat(self._store_fd).st_size < self._store_bytes:
                raise CorruptRegion("the SlotStore is corrupt: it was truncated")

    def fail(self, error: Exception) -> None:
        """Give up regions that turned out unusable: nobody is served from them again."""
        with self._lock:
            self._drop_index()
            self._drop_regions()
            self._give_up(error)

    def stats(self) -> dict[str, Any]:
        """The region's counters; the last ones read when it cannot be read now, {} if there never was one."""
        index = self.index
        if index is not None:
            with contextlib.suppress(RadixError):
                self._last_stats = name_stats(index.stats())
        return self._last_stats

    def probe(self) -> tuple[bool, str]:
        """Whether clients can be served: by a real lookup once there are regions."""
        info, index = self._state.info, self.index
        if info.mode == "waiting":
            return True, "waiting for a client's geometry"
        if info.mode != "ready" or index is None:
            return False, f"{info.mode}: {info.last_error}" if info.last_error else info.mode
        try:
            look_up(index)
        except RadixError as error:
            return False, f"a lookup failed: {error}"
        return True, "ready"

    # -- leaving ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for a build under way, which gives up once the server is closing."""
        builder = self._builder
        if builder is not None:
            builder.join()

    def leave(self, keep: bool) -> bool:
        """Detach, and retire and unlink the regions unless ``keep``; returns whether they are kept."""
        with self._lock:
            had_regions = self.index is not None
            self._drop_index()
            if had_regions and not keep:
                self._drop_regions()
            return had_regions and keep

    def _drop_regions(self) -> None:
        """Of regions that this server made or adopted, so their names are certain even if they are broken."""
        drop_regions(self._config.name, self._config.resolved_data_name, self._config.hugepage_path)

    def _drop_index(self) -> None:
        if self.index is not None:
            self.index.close()
            self.index = None
        if self._store_fd >= 0:
            os.close(self._store_fd)
            self._store_fd = -1


def describe_budget(config: ServerConfig) -> str:
    """What a server was given, with the exact bytes."""
    if not config.data_bytes:
        return "index only"
    ratios = f", SWA ratio {config.swa_ratio:g}, Mamba ratio {config.mamba_ratio:g}"
    return f"{config.data_bytes} bytes ({format_size(config.data_bytes)}) for KV{ratios}"
