"""What a task engine is started with, as plain data: it crosses to the KVServer as it is."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv_radix.transfer.protocol import CudaPath, LayerwiseSocket, Owner
from radixshmem import Geometry


@dataclass(frozen=True)
class EngineSpec:
    """One data-parallel group of one engine instance."""

    radix_server_name: str
    geometry: Geometry
    num_ranks: int  # that will register KV tensors
    register_endpoint: str  # Unix socket at which they do
    dp_client_id: int = 0
    layerwise_sockets: tuple[LayerwiseSocket, ...] = ()
    copy_threads: int = 0
    thread_blocks: int = 0
    cuda_path: CudaPath = CudaPath.AUTO
    queue_threads: int = 0
    attach_timeout_s: float = 600.0
    task_ttl_s: float = 600.0
    strict: bool = False
    switched_off: str = ""  # by which setting the cache is off
    owner: Owner | None = None  # whose processes may register
