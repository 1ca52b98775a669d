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
    TransferOp,
)
from radixshmem import ComponentType, RadixClient

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.02


class StoreLink:
    """Attaches, starts the worker, and closes both in the right order."""

    def __init__(self, spec: EngineSpec, stop: threading.Event) -> None:
        self._spec = spec
        self._stop = stop
        self._transfers: TransferHandle | None = None
        self._client: RadixClient | None = None
        self._store: StoreSpec | None = None

    def attach(self) -> CacheEngineRadixShmem:
        """Wait for the radix-server.  Raises what attach_radix_client does, and RadixError without slots."""
        spec = self._spec
        self._client = attach_radix_client(
            spec.radix_server_name, spec.geometry, spec.attach_timeout_s, self._stop
        )
        self._store = store_spec(self._client)
        return CacheEngineRadixShmem(self._client)

    def start_worker(self) -> None:
        """Start the transfer worker and wait until all ranks have registered, or the engine stops.

        RuntimeError with the worker's text if it cannot start.
        """
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
        )
        index = self._client.index
        self._transfers = TransferHandle(config, lease_fd=index.lease_fd(), mark_device=index.set_device)
        self._transfers.start()
        while not self._transfers.is_ready():
            if self._stop.wait(_READY_POLL_S):
                return

    def submit(self, ops: list[TransferOp]) -> None:
        """Hand ops to the worker; TransferDied when it is gone."""
        if self._transfers is None:
            raise TransferDied("the transfer worker is not running")
        self._transfers.submit(ops)

    def poll(self, timeout_s: float) -> list[OpResult]:
        """Finished transfers; waits up to timeout_s for the first.  TransferDied when the worker is gone."""
        if self._transfers is None:
            raise TransferDied("the transfer worker is not running")
        return self._transfers.poll(timeout_s)

    def stop_worker(self) -> None:
        """After this nobody writes to staged slots any more."""
        if self._transfers is not None:
            self._transfers.shutdown()
            self._transfers = None

    def close(self) -> None:
        """Stop the worker, then leave the radix-server: it takes back whatever is still held."""
        self.stop_worker()
        if self._client is not None:
            self._client.close()


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
