"""A task engine's way to the bytes: the radix-server's store and the transfer worker that maps it."""

from __future__ import annotations

import logging
import os
import threading

from flexkv_radix.attach import attach_radix_client
from flexkv_radix.spec import EngineSpec
from flexkv_radix.tier import CacheEngineRadixShmem
from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import (
    OpResult,
    PoolSpec,
    StoreSpec,
    TransferConfig,
    TransferDied,
)
from radixshmem import ComponentType, RadixClient, RadixError, RegionRetired

logger = logging.getLogger(__name__)


class StoreLink:
    """Attaches, starts the worker, and ends both; each can be done again."""

    def __init__(self, spec: EngineSpec, stop: threading.Event, lifeline_fd: int | None = None) -> None:
        """lifeline_fd: how somebody else knows of the end of transfer workers (TransferHandle)."""
        self._lifeline_fd = lifeline_fd
        self._spec = spec
        self._stop = stop
        self._client: RadixClient | None = None
        self._store: StoreSpec | None = None
        self.tier: CacheEngineRadixShmem | None = None  # while attached
        self.worker: TransferHandle | None = None  # while it runs

    def attach(self, timeout_s: float) -> None:
        """Wait for the radix-server.  Raises what attach_radix_client does, and RadixError without slots."""
        client = attach_radix_client(self._spec.radix_server_name, self._spec.geometry, timeout_s, self._stop)
        try:
            self._store = store_spec(client)
            self.tier = CacheEngineRadixShmem(client)
        except BaseException:
            client.close()
            raise
        self._client = client

    def check_region(self) -> None:
        """RegionRetired if the radix-server ended for good or made its regions anew."""
        if self._client is None:
            return
        try:
            self._client.mempool_total()
        except RegionRetired:
            raise
        except RadixError as error:  # requests meet it too, and count as misses
            logger.debug("the region cannot be looked at: %s", error)

    def start_worker(self) -> None:
        """Start the transfer worker; returns at once."""
        assert self._client is not None, "attach() comes first"
        assert self._store is not None, "attach() comes first"
        config = TransferConfig(
            store=self._store,
            num_ranks=self._spec.num_ranks,
            register_endpoint=self._spec.register_endpoint,
            copy_threads=self._spec.copy_threads,
            thread_blocks=self._spec.thread_blocks,
            cuda_path=self._spec.cuda_path,
            queue_threads=self._spec.queue_threads,
            layerwise_sockets=self._spec.layerwise_sockets,
            owner=self._spec.owner,
        )
        index = self._client.index
        worker = TransferHandle(
            config, lease_fd=index.lease_fd(), lifeline_fd=self._lifeline_fd, mark_device=index.set_device
        )
        worker.start()
        self.worker = worker

    def is_worker_ready(self) -> bool:
        """Whether all ranks have registered.  TransferDied with the worker's text if it cannot start."""
        return self.worker is not None and self.worker.is_ready()

    def poll(self, timeout_s: float) -> list[OpResult]:
        """Finished transfers; waits up to timeout_s for the first.  TransferDied when the worker is gone."""
        if self.worker is None:
            raise TransferDied("the transfer worker is not running")
        return self.worker.poll(timeout_s)

    def stop_worker(self) -> None:
        """After this nobody writes to staged slots any more."""
        if self.worker is not None:
            self.worker.shutdown()
            self.worker = None

    def leave(self) -> None:
        """Stop the worker, then leave the radix-server: it takes back whatever is still held."""
        self.stop_worker()
        self.tier = None
        if self._client is not None:
            self._client.close()
            self._client = None


def store_spec(client: RadixClient) -> StoreSpec:
    """Where the pools lie, for a worker that maps the SlotStore by itself."""
    store, geometry = client.store, client.geometry
    assert geometry is not None, "a client with a store has a geometry"
    pools = []
    for component, name in ((ComponentType.FULL, "full"), (ComponentType.SWA, "swa")):
        if name in geometry["pools"]:
            pool = store.pool(component)
            slot_bytes = int(geometry["pools"][name]["slot_bytes"])
            pools.append(PoolSpec(component, pool.offset, pool.num_slots, pool.slot_bytes, slot_bytes))
    path = os.path.join(client.info.hugepage_path or "/dev/shm", client.info.data_name.lstrip("/"))
    return StoreSpec(path, tuple(pools))
