"""The cache's KV events in an engine's own types, for the engine's own publisher."""

from __future__ import annotations

from collections import deque
from typing import Any

from flexkv_radix.events import BlockRemoved, BlockStored, KVEvent


class EventBuffer:
    """Collects on the KVManager's thread, gives out on the scheduler's.

    types: the engine's module with BlockStored, BlockRemoved and AllBlocksCleared; stored_fields: further
    fields that its BlockStored wants.
    """

    def __init__(self, types: Any, **stored_fields: Any) -> None:
        self._types = types
        self._stored_fields = stored_fields
        self._events: deque[KVEvent] = deque()

    def __call__(self, events: list[KVEvent]) -> None:
        self._events.extend(events)

    def take(self) -> list[Any]:
        """Events since the last call, in order."""
        return [self._converted(self._events.popleft()) for _ in range(len(self._events))]

    def _converted(self, event: KVEvent) -> Any:
        if isinstance(event, BlockStored):
            return self._types.BlockStored(
                block_hashes=list(event.block_hashes),
                parent_block_hash=event.parent_block_hash,
                token_ids=list(event.token_ids),
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=event.medium,
                **self._stored_fields,
            )
        if isinstance(event, BlockRemoved):
            return self._types.BlockRemoved(block_hashes=list(event.block_hashes), medium=event.medium)
        return self._types.AllBlocksCleared()
