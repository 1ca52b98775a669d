"""How a KVManager gets its task engine: from configuration and settings to a backend."""

from __future__ import annotations

import logging
from functools import cache
from typing import cast

from flexkv_radix.attach import expected_geometry
from flexkv_radix.backend import Backend
from flexkv_radix.config import CacheConfig, ModelConfig
from flexkv_radix.layerwise import build_layerwise_eventfd_socket_path
from flexkv_radix.metrics import MetricsEndpoint
from flexkv_radix.settings import FlexKVSettings, client_id_of, rank_endpoint, warn_once
from flexkv_radix.spec import EngineSpec
from flexkv_radix.tasks import KVTaskEngine
from flexkv_radix.trace import TracedBackend
from flexkv_radix.transfer.claims import Claim, new_owner
from flexkv_radix.transfer.protocol import CudaPath, LayerwiseSocket

logger = logging.getLogger(__name__)


def gpu_register_port_of(server_recv_port: str) -> str:
    """Where ranks register unless told otherwise."""
    return f"{server_recv_port}_gpu_register"


def engine_spec(
    settings: FlexKVSettings, model_config: ModelConfig, cache_config: CacheConfig,
    dp_client_id: int, server_recv_port: str, gpu_register_port: str,
) -> EngineSpec:  # fmt: skip
    """What the task engine of one data-parallel group is started with."""
    if cache_config.cpu_cache_gb:
        warn_once("cpu_cache_gb has no effect: the size of the cache is radix-server's --data-bytes")
    sockets: tuple[LayerwiseSocket, ...] = ()
    if settings.enable_layerwise_transfer:
        sockets = tuple(
            LayerwiseSocket(build_layerwise_eventfd_socket_path(dp_client_id, pp_rank, model_config), pp_rank)
            for pp_rank in range(model_config.pp_size)
        )
    return EngineSpec(
        radix_server_name=settings.radixshmem_server_name,
        geometry=expected_geometry(model_config, cache_config),
        num_ranks=model_config.num_ranks,
        register_endpoint=rank_endpoint(
            settings, gpu_register_port or gpu_register_port_of(server_recv_port), dp_client_id
        ),
        owner=new_owner(is_private=bool(gpu_register_port)),
        dp_client_id=client_id_of(settings, dp_client_id, model_config.dp_size),
        layerwise_sockets=sockets,
        copy_threads=settings.copy_threads,
        thread_blocks=settings.transfer_thread_blocks,
        cuda_path=CudaPath[settings.transfer_path.upper()],
        queue_threads=settings.transfer_queue_threads,
        attach_timeout_s=settings.attach_timeout_s,
        task_ttl_s=settings.task_ttl_s,
        strict=settings.strict,
        switched_off=""
        if settings.enable_radixshmem
        else "FLEXKV_ENABLE_RADIXSHMEM=0, and there is no other cache",
    )


def claim_endpoint(spec: EngineSpec) -> Claim:
    """From now on ranks that might be of spec's engine register with no other."""
    assert spec.owner is not None, "engine_spec() names one"
    return Claim(spec.register_endpoint, spec.owner)


@cache
def metrics_endpoint(port: int) -> MetricsEndpoint:
    """The one metrics endpoint of this process."""
    return MetricsEndpoint(port)


def make_backend(settings: FlexKVSettings, spec: EngineSpec, server_recv_port: str) -> Backend:
    """The task engine itself, or a client of the node's KVServer where settings ask for one."""
    if settings.server_client_mode or settings.server_launch_mode:
        from flexkv_radix.server.client import KVDPClient

        backend: Backend = KVDPClient(
            server_recv_port, spec, launch_server=settings.server_launch_mode != "external"
        )
    else:
        endpoint = metrics_endpoint(settings.metrics_port) if settings.enable_metrics else None
        backend = KVTaskEngine(spec, metrics_endpoint=endpoint)
    return (
        cast(Backend, TracedBackend(backend, settings.trace_file_path)) if settings.enable_trace else backend
    )
