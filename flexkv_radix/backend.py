"""Where a KVManager's tasks run: in this process (KVTaskEngine) or in the node's KVServer (client.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexkv_radix.config import CacheConfig
from flexkv_radix.events import RingReader
from flexkv_radix.launching import Launch
from flexkv_radix.planner import Blocks
from flexkv_radix.ring import Hashes
from flexkv_radix.table import Answer


class Backend(RingReader, Protocol):
    """The verbs of KVTaskEngine, which say what they do there."""

    @property
    def disabled(self) -> str: ...

    def start(self) -> None: ...

    def is_ready(self) -> bool: ...

    def shutdown(self) -> None: ...

    @property
    def region(self) -> str: ...

    def adopt_into(self, cache_config: CacheConfig) -> str: ...

    def get_match(
        self, hashes: Hashes, num_tokens: int, wanted: Blocks, *, swa: bool = False
    ) -> tuple[int, Blocks]: ...

    def put_match(
        self, hashes: Hashes, num_tokens: int, wanted: Blocks, *, swa: bool = False
    ) -> tuple[int, Blocks]: ...

    def prefetch(self, hashes: Hashes, num_tokens: int, *, swa: bool = False) -> int: ...

    def launch(
        self,
        launches: Sequence[Launch],
        *,
        as_batch: bool = False,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> list[int]: ...

    def poll(self, task_ids: Sequence[int]) -> dict[int, Answer]: ...

    def wait(self, task_ids: Sequence[int], timeout_s: float) -> dict[int, Answer]: ...

    def cancel(self, task_ids: Sequence[int]) -> None: ...

    def cancel_all(self) -> None: ...
