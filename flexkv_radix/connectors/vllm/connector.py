"""vLLM's connector interface, delegated to ConnectorCore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from flexkv_radix.connectors.vllm.core import ConnectorCore
from flexkv_radix.connectors.vllm.stats import RadixShmemPromMetrics, RadixShmemStats


class RadixShmemConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM may not be installed
    """The node's KV cache for vLLM.  Options: see ConnectorCore."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._core = ConnectorCore(vllm_config, role, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a miss later on, nothing to recompute for."""
        return False

    def shutdown(self) -> None:
        self._core.shutdown()

    # -- workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._core.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are started by the scheduler and run in the transfer worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads that a step needs are in place before it."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores start when the request has finished."""

    def wait_for_save(self) -> None:
        """Blocks that are being stored stay allocated until get_finished names their request."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._core.finished(self._connector_metadata)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._core.failed_blocks(self._connector_metadata)

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._core.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._core.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._core.build_connector_meta()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._core.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return self._core.take_events()

    def reset_cache(self) -> bool | None:
        return self._core.reset_cache()

    # -- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._core.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return RadixShmemStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return RadixShmemPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
