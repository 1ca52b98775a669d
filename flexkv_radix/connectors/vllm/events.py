"""KV events of the cache in vLLM's own types, for its publisher."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed import kv_events as vllm_events

from flexkv_radix.events import BlockRemoved, BlockStored, KVEvent


class EventBuffer:
    """Collects on the KVManager's thread, gives out on the scheduler's."""

    def __init__(self, vllm_config: Any) -> None:
        config = vllm_config.kv_events_config
        self.enabled = bool(config is not None and config.enable_kv_cache_events)
        self._events: deque[KVEvent] = deque()

    def __call__(self, events: list[KVEvent]) -> None:
        self._events.extend(events)

    def take(self) -> Iterable[Any]:
        """vLLM's events since the last call."""
        while self._events:
            yield _as_vllm_event(self._events.popleft())


def _as_vllm_event(event: KVEvent) -> Any:
    if isinstance(event, BlockStored):
        return vllm_events.BlockStored(
            block_hashes=list(event.block_hashes),
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=None,
        )
    if isinstance(event, BlockRemoved):
        return vllm_events.BlockRemoved(block_hashes=list(event.block_hashes), medium=event.medium)
    return vllm_events.AllBlocksCleared()
