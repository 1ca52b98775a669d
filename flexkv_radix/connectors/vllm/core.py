"""Behind vLLM's interface: what RadixShmemConnector and FlexKVConnectorV1Impl have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed import kv_events as vllm_events
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.connectors.counters import Counters
from flexkv_radix.connectors.events import EventBuffer
from flexkv_radix.connectors.readiness import await_ready
from flexkv_radix.connectors.vllm.plan import EnginePlan, UnsupportedEngine, identity_of, plan_of
from flexkv_radix.connectors.vllm.scheduler import Request, SchedulerSide, StepReport, manager_of
from flexkv_radix.connectors.vllm.stats import RadixShmemStats
from flexkv_radix.connectors.vllm.worker import WorkerSide
from flexkv_radix.settings import load_settings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 10.0


class RadixShmemMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM may not be installed
    """Scheduler to workers, once a step."""

    def __init__(self, report: StepReport) -> None:
        self.report = report


class ConnectorCore:
    """Either role's half of a connector.

    kv_connector_extra_config: `load_async` (true): a request waits for its load while others run;
    `ready_timeout_s` (10): how long the engine's start waits for the cache, after which it serves
    without until the cache is there; `weights_version` (""): told apart from engines with another one.

    Where the engine's KV cannot be cached, every method does nothing (FLEXKV_STRICT=1: it is not made).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any | None) -> None:
        self._cache: SharedCache | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._events = EventBuffer(vllm_events, lora_name=None)
        self._counted = Counters()
        # vLLM's default fails the requests whose load failed; for a cache that is but a miss.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        try:
            plan = plan_of(vllm_config, kv_cache_config)
        except UnsupportedEngine as error:
            if load_settings().strict:
                raise
            logger.warning("the node's KV cache is off for this engine: %s", error)
            return
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config, plan)
        else:
            self._worker = WorkerSide(
                plan, tp_rank=get_tp_group().rank_in_group, pp_rank=get_pp_group().rank_in_group
            )

    def _start_scheduler(self, vllm_config: Any, plan: EnginePlan) -> None:
        transfer = vllm_config.kv_transfer_config
        options = transfer.kv_connector_extra_config
        events = self._events if _wants_events(vllm_config) else None
        manager = manager_of(plan, identity_of(vllm_config, vllm.__version__), events)
        self._cache = SharedCache(manager, plan.tokens_per_block)
        self._scheduler = SchedulerSide(
            self._cache,
            load_async=bool(options.get("load_async", True)),
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
        )
        manager.start()
        if version := str(options.get("weights_version", "")):
            self._cache.reset(version)
        timeout_s = float(options.get("ready_timeout_s", _READY_TIMEOUT_S))
        await_ready(self._cache, timeout_s, load_settings())

    # -- workers

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        try:
            self._worker.register_kv_caches(kv_caches)
        except ValueError as error:
            if load_settings().strict:
                raise
            logger.warning("the node's KV cache is off for this engine: %s", error)

    @staticmethod
    def finished(metadata: KVConnectorMetadata | None) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose store and whose load ended, of a step's metadata."""
        if not isinstance(metadata, RadixShmemMetadata):
            return None, None
        return metadata.report.finished_stores or None, metadata.report.finished_loads or None

    @staticmethod
    def failed_blocks(metadata: KVConnectorMetadata | None) -> set[int]:
        """Blocks whose load failed, of a step's metadata."""
        return set(metadata.report.failed_blocks) if isinstance(metadata, RadixShmemMetadata) else set()

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            # MultiConnector hands empty blocks to the connectors that it did not choose.
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self) -> RadixShmemMetadata:
        return RadixShmemMetadata(self._scheduler.take_report() if self._scheduler else StepReport())

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, None]:
        return self._scheduler is not None and self._scheduler.request_finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        return self._events.take()

    def take_stats(self) -> RadixShmemStats | None:
        """What was counted since the last call."""
        if self._cache is None:
            return None
        increments = self._cache.counters.since(self._counted)
        self._counted = self._cache.counters.copy()
        return RadixShmemStats(data=increments) if increments else None

    def reset_cache(self) -> bool:
        if self._cache is not None:
            self._cache.reset()
        return True

    def shutdown(self) -> None:
        if self._cache is not None:
            self._cache.close()
        if self._worker is not None:
            self._worker.close()


def _wants_events(vllm_config: Any) -> bool:
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)
