"""RadixServer: start, serve, stop.

start   check everything -> name lock -> leftovers -> socket -> upkeep
serve   Configure -> plan -> make regions (or adopt them at start) -> ready
close   no new requests -> stop what runs -> retire and unlink -> name lock
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import grpc

import radixshmem
from radixshmem.config import ServerConfig
from radixshmem.control.service import build_server
from radixshmem.errors import RadixError
from radixshmem.geometry import Geometry
from radixshmem.info import ServerInfo
from radixshmem.server.builder import access_of
from radixshmem.server.endpoint import bind_endpoint, release_endpoint
from radixshmem.server.exits import ClusterUnavailable
from radixshmem.server.http import MetricsServer
from radixshmem.server.keeper import RegionKeeper, describe_budget
from radixshmem.server.lock import NameLock
from radixshmem.server.machine import Machine
from radixshmem.server.metrics import RegionCollector, build_registry
from radixshmem.server.preflight import check_machine, memlock_note
from radixshmem.server.state import ServerState
from radixshmem.server.upkeep import Upkeep

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # for control requests under way when the server closes


class RadixServer:
    """A radix-server in this process.

    ``start()`` returns once clients can bring their geometry (after an adoption: be served).  It
    raises ValueError naming the flag, NameInUse, NoSpace, LeftoversInUse, ClusterUnavailable, and
    RadixError for anything else; ``radixshmem.server.exit_code`` maps them to exit codes.
    """

    def __init__(self, config: ServerConfig, *, show_progress: bool = False) -> None:
        """``show_progress``: draw a progress bar if standard error is a terminal."""
        self.config = config
        self._machine = Machine()
        self._state = ServerState(_first_info(config))
        self._access = access_of(config)
        self._keeper = RegionKeeper(config, self._state, self._machine, self._access, show_progress)
        self._upkeep = Upkeep(
            lambda: self._keeper.index,
            config.background_evict_ratio,
            self._keeper.verify_files,
            self._keeper.fail,
        )
        self._lock: NameLock | None = None
        self._rpc: grpc.Server | None = None
        self._metrics: MetricsServer | None = None
        self._life = threading.Lock()  # one start or close at a time
        self._closed = threading.Event()

    @property
    def info(self) -> ServerInfo:
        """What the server is doing now."""
        return self._state.info

    @property
    def metrics_address(self) -> str:
        """``host:port`` of the HTTP endpoint; "" without one."""
        return self._metrics.address if self._metrics else ""

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> RadixServer:
        """Start serving.  Nothing is left behind when this raises."""
        with self._life:
            if self._lock is not None:
                raise RadixError("this RadixServer was started before; make another one")
            self._check_config()
            self._lock = NameLock(self.config.name)
            try:
                self._start_locked()
            except BaseException:
                self._stop_serving()
                self._keeper.leave(keep=True)
                self._lock.remove()
                self._closed.set()
                raise
        return self

    def close(self) -> None:
        """Stop: requests under way get a moment; socket and regions (unless ``keep``) go.  Idempotent."""
        with self._life:
            if self._lock is None or self._closed.is_set():
                return
            self._state.update(mode="closing")
            self._stop_serving()
            if self._keeper.leave(self.config.keep):
                self._lock.release()
                log.info("radix-server %s stopped; its regions wait for the next one", self.config.name)
            else:
                self._lock.remove()
                log.info("radix-server %s stopped", self.config.name)
            self._closed.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server is closed; returns whether it is."""
        return self._closed.wait(timeout_s)

    def __enter__(self) -> RadixServer:
        return self if self._lock is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what clients, probes and scrapers ask ----------------------------------------------------

    def configure(self, geometry: Geometry | None) -> ServerInfo:
        """Accept a client's geometry; see RegionKeeper.configure."""
        return self._keeper.configure(geometry)

    def wait_change(self, seen: ServerInfo, timeout_s: float) -> ServerInfo:
        """The state once it differs from ``seen``, or after ``timeout_s``."""
        return self._state.wait_change(seen, timeout_s)

    def stats(self) -> dict[str, Any]:
        """The region's counters by name; {} before there is one."""
        return self._keeper.stats()

    def probe_health(self) -> tuple[bool, str]:
        """Whether the process works, whatever its mode."""
        return (True, "ok") if self._upkeep.is_alive() else (False, "the upkeep thread is stuck")

    def probe_ready(self) -> tuple[bool, str]:
        """Whether clients can be served: by a real lookup once there are regions."""
        return self._keeper.probe()

    # -- parts ------------------------------------------------------------------------------------

    def _check_config(self) -> None:
        if self.config.is_cluster:
            flag = "--registry" if self.config.registry else "--expected-min-nodes"
            raise ClusterUnavailable(
                f"{flag}: cluster mode is not available yet; start without --registry and with "
                "--expected-min-nodes 1"
            )
        check_machine(self.config, self._machine)
        if self.config.group and not self.config.mode & 0o060:
            log.warning("--group has no effect with --mode %04o", self.config.mode)

    def _start_locked(self) -> None:
        log.info(
            "radix-server %s %s: %s", radixshmem.__version__, self.config.name, describe_budget(self.config)
        )
        note = memlock_note(self.config, self._machine)
        if note:
            log.info("%s", note)
        adopted = self._keeper.settle_leftovers()
        rpc = build_server(self, self.config.rpc_workers)
        bind_endpoint(rpc, self.config.resolved_endpoint, self._access)
        self._rpc = rpc
        self._metrics = self._bind_metrics()
        self._upkeep.start()
        if adopted:
            self._keeper.serve_adopted(adopted)
        rpc.start()
        if not adopted:
            log.info("Waiting for a client's geometry at %s", self.config.resolved_endpoint)

    def _bind_metrics(self) -> MetricsServer | None:
        """A given address must be had; of two servers with the default one, the later does without."""
        address = self.config.resolved_metrics_address
        if address is None:
            return None
        registry = build_registry(RegionCollector(self.stats, lambda: self.info, self._figures))
        try:
            return MetricsServer(*address, registry, self.probe_health, self.probe_ready)
        except OSError as error:
            text = "--metrics-address: {}:{} cannot be bound: {}".format(*address, error.strerror or error)
            if self.config.metrics_address is not None:
                raise RadixError(text) from error
            log.warning("%s; running without a metrics endpoint", text)
            return None

    def _figures(self) -> Mapping[str, float]:
        return {
            "prefault_seconds": self._keeper.prefault_s,
            "unfingerprinted": self._keeper.num_unfingerprinted,
        }

    def _stop_serving(self) -> None:
        """Requests first, so that nobody starts what the rest waits for."""
        if self._rpc is not None:
            release_endpoint(self._rpc, self.config.resolved_endpoint, _GRACE_S)
        self._keeper.stop()
        self._upkeep.stop()
        if self._metrics is not None:
            self._metrics.close()


def _first_info(config: ServerConfig) -> ServerInfo:
    return ServerInfo(
        name=config.name,
        index_name=config.name,
        data_name=config.resolved_data_name,
        endpoint=config.resolved_endpoint,
        mode="waiting",
        data_plane=bool(config.data_bytes),
        hugepage_path=config.hugepage_path,
        pid=os.getpid(),
        version=radixshmem.__version__,
    )
