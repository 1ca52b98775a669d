"""What every connector does with the node's cache, whatever the engine.

    lookup --> HELD --start_load--> LOADING --poll/wait_load--> loaded | failed: the engine recomputes
                | release
                v
              dropped
    start_store --> STORING --poll--> stored | failed: one hit less later

Guarantees: no method raises because of the cache.  An error of it is a miss, a counter and one log line;
whatever a lookup pinned is dropped by exactly one of start_load, release, reset and close.
Assumes: one thread calls (an engine's scheduler).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexkv_radix.connectors.counters import Counters
from flexkv_radix.responses import KVResponse, KVResponseStatus

if TYPE_CHECKING:
    from flexkv_radix.manager import KVManager

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]
Namespace = list[str] | None

# Whatever the cache may raise: RadixError, TransferDied and what a launch answers to a task that expired.
# The engine serves on without the cache in each case.
CACHE_ERRORS = (RuntimeError, ValueError, KeyError, OSError)

_REMIND_S = 10.0
_MAX_WARNINGS = 100  # texts may name tasks or blocks: a failing cache must not fill the log


@dataclass(frozen=True)
class _Held:
    """A pinned match that waits for the engine's memory."""

    task_id: int
    num_tokens: int
    num_computed_tokens: int
    namespace: tuple[str, ...]
    hit_tokens: int

    def answers(self, tokens: Sequence[int] | Tokens, num_computed_tokens: int, namespace: Namespace) -> bool:
        """Whether a lookup with these arguments was answered by this match.  Tokens of a key only grow."""
        return (self.num_tokens, self.num_computed_tokens, self.namespace) == (
            len(tokens), num_computed_tokens, tuple(namespace or ()),
        )  # fmt: skip


@dataclass(frozen=True)
class _Running:
    """A transfer that has not been reported yet."""

    task_id: int
    num_tokens: int


@dataclass
class Completed:
    """What ended since the last poll.  loads: True for those whose bytes are in place."""

    loads: dict[Hashable, bool] = field(default_factory=dict)
    stores: dict[Hashable, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)


class SharedCache:
    """Loads and stores of one engine, each named by a key of the engine's choice (its request id, say)."""

    def __init__(self, manager: KVManager, tokens_per_block: int) -> None:
        self.manager = manager
        self.tokens_per_block = tokens_per_block
        self.counters = Counters()
        self._held: dict[Hashable, _Held] = {}
        self._loads: dict[Hashable, _Running] = {}
        self._stores: dict[Hashable, _Running] = {}
        self._is_ready = False
        self._warned: set[str] = set()

    # -- loads

    def lookup(
        self,
        key: Hashable,
        tokens: Sequence[int] | Tokens,
        num_computed_tokens: int = 0,
        namespace: Namespace = None,
    ) -> int:
        """Tokens after the first num_computed_tokens that a load can bring: whole blocks, pinned until
        start_load or release.  num_computed_tokens: already in the engine's memory, whole blocks.

        Asking again for the same is free and holds nothing more; anything else drops the earlier match.
        """
        held = self._held.get(key)
        if held is not None and held.answers(tokens, num_computed_tokens, namespace):
            return held.hit_tokens
        self.release(key)
        if not self.is_ready() or len(tokens) - num_computed_tokens < self.tokens_per_block:
            return 0
        self.counters.lookups += 1
        self.counters.lookup_tokens += len(tokens) - num_computed_tokens
        try:
            hit_tokens = self._match(key, np.asarray(tokens, dtype=np.int64), num_computed_tokens, namespace)
        except CACHE_ERRORS as error:
            self._failed("a lookup", error)
            return 0
        self.counters.hit_tokens += hit_tokens
        return hit_tokens

    def _match(self, key: Hashable, tokens: Tokens, num_computed_tokens: int, namespace: Namespace) -> int:
        wanted = np.ones(len(tokens), dtype=np.bool_)
        wanted[:num_computed_tokens] = False
        task_id, mask = self.manager.get_match(tokens, wanted, namespace=namespace)
        hit_tokens = int(np.count_nonzero(mask))
        if hit_tokens:
            self._held[key] = _Held(
                task_id, len(tokens), num_computed_tokens, tuple(namespace or ()), hit_tokens
            )
        return hit_tokens

    def release(self, key: Hashable) -> None:
        """Drop the match that key holds, if any."""
        held = self._held.pop(key, None)
        if held is not None:
            self._cancel([held.task_id])

    def start_load(
        self,
        key: Hashable,
        slot_mapping: npt.NDArray[np.int64],
        *,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> bool:
        """Load what lookup(key) found into slot_mapping, int64 [hit tokens], an engine's slot per token.

        False if it could not be started (poll says nothing of it then).
        """
        held = self._held.pop(key, None)
        if held is None:
            return False
        try:
            (task_id,) = self.manager.launch(
                [held.task_id], [slot_mapping], layerwise_transfer=layerwise, counter_id=counter_id
            )
        except CACHE_ERRORS as error:
            self._failed("a load", error)
            self.counters.load_ended(False, 0)
            self._cancel([held.task_id])
            return False
        self._loads[key] = _Running(task_id, held.hit_tokens)
        return True

    def finish_load(self, key: Hashable) -> bool:
        """Wait for the load of key.  False: it failed, recompute."""
        return self._load_ended(key, self._answer(self._loads[key].task_id))

    # -- stores

    def start_store(
        self,
        key: Hashable,
        tokens: Sequence[int] | Tokens,
        slot_mapping: npt.NDArray[np.int64],
        namespace: Namespace = None,
    ) -> bool:
        """Store the whole blocks of tokens that the cache lacks, from slot_mapping, int64, a slot per token.

        True: poll will report it, and until then the slots must keep their contents.
        """
        num_tokens = len(tokens) // self.tokens_per_block * self.tokens_per_block
        if num_tokens == 0 or not self.is_ready() or key in self._stores:
            return False
        whole = np.asarray(tokens[:num_tokens], dtype=np.int64)
        try:
            task_id, mask = self.manager.put_match(whole, namespace=namespace)
        except CACHE_ERRORS as error:
            self._failed("a store", error)
            return False
        if not mask.any():
            self._forget(task_id)
            return False
        try:
            (task_id,) = self.manager.launch([task_id], [slot_mapping[:num_tokens][mask]])
        except CACHE_ERRORS as error:
            self._failed("a store", error)
            self.counters.store_ended(False, 0)
            self._cancel([task_id])
            return False
        self._stores[key] = _Running(task_id, int(np.count_nonzero(mask)))
        return True

    # -- completion

    @property
    def num_running(self) -> int:
        """Loads and stores that poll has not reported yet."""
        return len(self._loads) + len(self._stores)

    def poll(self) -> Completed:
        """Loads and stores that ended since the last call."""
        completed = Completed()
        running = [transfer.task_id for transfer in (*self._loads.values(), *self._stores.values())]
        if not running:
            return completed
        try:
            responses = self.manager.try_wait(running)
        except CACHE_ERRORS as error:
            self._failed("a transfer", error)
            return completed
        for key, load in list(self._loads.items()):
            if load.task_id in responses:
                completed.loads[key] = self._load_ended(key, responses[load.task_id])
        for key, store in list(self._stores.items()):
            if store.task_id in responses:
                completed.stores[key] = self._store_ended(key, responses[store.task_id])
        return completed

    def finish_all(self) -> Completed:
        """Wait for everything that runs: afterwards no transfer touches the engine's memory."""
        completed = Completed()
        for key in list(self._loads):
            completed.loads[key] = self.finish_load(key)
        for key, store in list(self._stores.items()):
            completed.stores[key] = self._store_ended(key, self._answer(store.task_id))
        return completed

    def _answer(self, task_id: int) -> KVResponse | None:
        """Wait for a task, however long: until it is over, it may touch the engine's memory."""
        while True:
            try:
                response = self.manager.wait([task_id], timeout=_REMIND_S).get(task_id)
            except CACHE_ERRORS as error:
                self._failed("a transfer", error)
                return None
            if response is None or response.status is not KVResponseStatus.TIMEOUT:
                return response
            logger.warning("still waiting for a transfer of the node's KV cache")

    def _load_ended(self, key: Hashable, response: KVResponse | None) -> bool:
        running = self._loads.pop(key)
        ok = self._succeeded("a load", response)
        self.counters.load_ended(ok, running.num_tokens)
        return ok

    def _store_ended(self, key: Hashable, response: KVResponse | None) -> bool:
        running = self._stores.pop(key)
        ok = self._succeeded("a store", response)
        self.counters.store_ended(ok, running.num_tokens)
        return ok

    def _succeeded(self, what: str, response: KVResponse | None) -> bool:
        if response is None:
            return False
        if response.status is KVResponseStatus.FAILED:
            self._failed(what, response.error)
        return response.status is KVResponseStatus.SUCCESS

    # -- life

    def is_ready(self) -> bool:
        """Whether lookups may hit.  False for good after the cache failed to start."""
        if not self._is_ready:
            try:
                self._is_ready = self.manager.is_ready()
            except CACHE_ERRORS as error:
                self._failed("the start", error)
        return self._is_ready

    def reset(self, weights: str = "") -> None:
        """The model's weights changed: of what was stored so far, this engine finds only what engines
        with the same version of the weights stored ("": nothing)."""
        for key in list(self._held):
            self.release(key)
        try:
            self.manager.reset(weights)
        except CACHE_ERRORS as error:
            self._failed("the reset", error)

    def close(self) -> None:
        """Give everything back and stop."""
        self._held.clear()
        self.manager.shutdown()

    def _cancel(self, task_ids: list[int]) -> None:
        try:
            self.manager.cancel(task_ids)
            self.manager.try_wait(task_ids)
        except CACHE_ERRORS as error:
            self._failed("a cancellation", error)

    def _forget(self, task_id: int) -> None:
        """Collect the answer of a task with nothing to move; it may say that there was no space."""
        try:
            response = self.manager.try_wait([task_id]).get(task_id)
        except CACHE_ERRORS as error:
            self._failed("a store", error)
            return
        if response is not None and response.status is KVResponseStatus.FAILED:
            self.counters.store_ended(False, 0)
            self._failed("a store", response.error)

    def _failed(self, what: str, error: object) -> None:
        """Count and, the first time for each text, log."""
        self.counters.errors += 1
        text = f"{what} failed: {error}"
        if text not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(text)
            logger.warning("the node's KV cache: %s; the engine goes on without", text)
