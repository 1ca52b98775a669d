"""What vLLM's own FlexKVConnectorV1 delegates to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from flexkv_radix.connectors.vllm.core import ConnectorCore, RadixShmemMetadata
from flexkv_radix.connectors.vllm.stats import RadixShmemStats


class FlexKVConnectorV1Impl:
    """The same connector under the name and with the constructor that FlexKVConnectorV1 calls.

    That class has no way to report failed loads' metadata or counters of its own, and keeps a step's
    metadata to itself; `_metadata` looks it up there.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole) -> None:
        self._core = ConnectorCore(vllm_config, role, None)

    def shutdown(self) -> None:
        self._core.shutdown()

    # -- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._core.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are started by the scheduler and run in the transfer worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads that a step needs are in place before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores start when the request has finished."""

    def wait_for_save(self) -> None:
        """Blocks that are being stored stay allocated until get_finished names their request."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._core.finished(self._metadata())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._core.failed_blocks(self._metadata())

    def _metadata(self) -> KVConnectorMetadata | None:
        """The step's metadata, bound to the connector that delegates to this object."""
        if not has_kv_transfer_group():
            return None
        group = get_kv_transfer_group()
        for connector in getattr(group, "sub_connectors", [group]):
            if getattr(connector, "_flexkv_connector", None) is self and connector.has_connector_metadata():
                return connector._get_connector_metadata()  # noqa: SLF001 - we act for that connector
        return None

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._core.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._core.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> RadixShmemMetadata:
        return self._core.build_connector_meta()

    def update_connector_output(self, connector_output: Any) -> None:
        """Nothing to learn: completions come from the transfer worker."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._core.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return self._core.take_events()

    def get_kv_connector_stats(self) -> RadixShmemStats | None:
        """None: FlexKVConnectorV1 cannot rebuild them in the process that logs."""
        return None
