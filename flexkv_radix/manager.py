"""KVManager: what an engine calls.  Tokens in, tokens out; its backend works in blocks.

It is the same object whether the tasks run in this process or in the node's KVServer.
"""

from __future__ import annotations

import logging
import operator
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexkv_radix.backend import Backend
from flexkv_radix.config import CacheConfig, ModelConfig
from flexkv_radix.events import EventCollector, EventPump, EventTracker
from flexkv_radix.hashing import Namespace, hash_tokens, names_within
from flexkv_radix.launching import Launch
from flexkv_radix.planner import Blocks
from flexkv_radix.responses import KVResponse
from flexkv_radix.ring import Hashes
from flexkv_radix.settings import load_settings
from flexkv_radix.start import claim_endpoint, engine_spec, make_backend
from flexkv_radix.table import Answer
from flexkv_radix.tokens import Mask, Tokens, as_mask, as_tokens, gpu_blocks_of, token_mask_of, wanted_blocks

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 1e6  # for ever; more than that is too much for some of the clocks below


class KVManager:
    """The KV cache of one data-parallel group of an engine.

    server_recv_port: endpoint of the KVServer, where one is used; gpu_register_port: where the ranks'
    KVTPClients register (ipc://<path>).  Both default to FLEXKV_SERVER_RECV_PORT and what follows from
    it.  event_collector is called with lists of KV events (events.py).

    If the radix-server refuses this engine, or does not come up in time, the cache is off: matches
    find nothing, is_ready() is True and `disabled` says why (FLEXKV_STRICT=1: is_ready() raises).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        dp_client_id: int = 0,
        server_recv_port: str = "",
        gpu_register_port: str = "",
        event_collector: EventCollector | None = None,
    ) -> None:
        settings = load_settings()
        recv_port = server_recv_port or settings.server_recv_port
        spec = engine_spec(settings, model_config, cache_config, dp_client_id, recv_port, gpu_register_port)
        self._claim = claim_endpoint(spec)
        self._cache_config = cache_config
        self._block = cache_config.tokens_per_block
        self._backend: Backend = make_backend(settings, spec, recv_port)
        self._weights = ""
        self._is_started = False
        self._region = ""  # whose counts cache_config has
        self._tracker = EventTracker(self._block) if event_collector else None
        self._pump: EventPump | None = None
        if self._tracker is not None and event_collector is not None:
            self._pump = EventPump(self._tracker, self._backend, event_collector)

    # -- life

    def start(self) -> None:
        """Attach to the radix-server and wait for KV tensors behind the caller's back; returns at once.

        A second call does nothing.
        """
        if self._is_started:
            return
        self._is_started = True
        self._backend.start()
        if self._pump is not None:
            self._pump.start()

    def is_ready(self) -> bool:
        """True once matches are served, or the cache was turned off.  RuntimeError if start-up failed."""
        if not self._backend.is_ready():
            return False
        self._adopt()
        return True

    def _adopt(self) -> None:
        """Let cache_config have the counts of the region that is served from, which may be another now."""
        region = self._backend.region
        if region and region != self._region:
            self._region = self._backend.adopt_into(self._cache_config)

    @property
    def disabled(self) -> str:
        """Why the cache is off; "" if it is not."""
        return self._backend.disabled

    def shutdown(self) -> None:
        """End all tasks and leave; other engines are not affected.  A second call does nothing."""
        if self._pump is not None:
            self._pump.stop()
        self._backend.shutdown()
        self._claim.close()

    def reset(self, weights: str = "") -> None:
        """The engine has new weights: nothing stored so far may be found by it again.

        All its tasks are cancelled.  Engines that give the same version share again.  What other
        engines stored stays theirs (RadixClient.reset() clears the node).  ValueError for a version with
        a NUL.
        """
        if "\x00" in weights:
            raise ValueError(f"weights: {weights!r} contains a NUL")
        self._weights = weights or uuid.uuid4().hex
        self._backend.cancel_all()
        if self._pump is not None:
            self._pump.clear()

    # -- matching

    def get_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        cpu_only: bool = False,
        namespace: Namespace = None,
        swa_aware: bool = False,
    ) -> tuple[int, Mask]:
        """Find the longest stored prefix and pin what token_mask wants of it.

        token_ids: [n] integers; token_mask: [n] bool, True = not on the GPU (None: all).  Returns the
        task and a mask [n] of the tokens that launch() will load.  cpu_only: there is no other tier.
        swa_aware: only as far as the sliding window is stored too; then launch() also takes
        swa_slot_mappings, for the last window's worth of the tokens loaded.
        """
        tokens, hashes, wanted = self._blocks_of(token_ids, token_mask, namespace)
        task_id, blocks = self._backend.get_match(hashes, len(tokens), wanted, swa=bool(swa_aware))
        self._adopt()
        return task_id, token_mask_of(blocks, self._block, len(tokens))

    def put_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        namespace: Namespace = None,
        swa_aware: bool = False,
    ) -> tuple[int, Mask]:
        """Stage slots for the blocks that are not stored yet.

        Returns the task and a mask [n] of the tokens that launch() will store: fewer than are missing if
        space is short.  With swa_aware the task also waits for launch() when only the window is missing.
        """
        tokens, hashes, wanted = self._blocks_of(token_ids, token_mask, namespace)
        if self._tracker is not None:
            self._tracker.remember(tokens, hashes)
        task_id, blocks = self._backend.put_match(hashes, len(tokens), wanted, swa=bool(swa_aware))
        self._adopt()
        return task_id, token_mask_of(blocks, self._block, len(tokens))

    def prefetch_async(self, token_ids: Any, namespace: Namespace = None, swa_aware: bool = False) -> int:
        """Bring blocks of other nodes here; the response's mask says what is here then."""
        tokens, hashes, _ = self._blocks_of(token_ids, None, namespace)
        return self._backend.prefetch(hashes, len(tokens), swa=bool(swa_aware))

    def _blocks_of(
        self, token_ids: Any, token_mask: Any, namespace: Namespace
    ) -> tuple[Tokens, Hashes, Blocks]:
        tokens = as_tokens("token_ids", token_ids)
        mask = as_mask(token_mask, len(tokens))
        hashes = hash_tokens(tokens, self._block, names_within(self._weights, namespace))
        return tokens, hashes, wanted_blocks(mask, self._block, len(hashes))

    # -- moving

    def launch(
        self,
        task_ids: int | Sequence[int],
        slot_mappings: Any,
        swa_slot_mappings: Any = None,
        as_batch: bool = False,
        layerwise_transfer: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """Start the transfers of matched tasks.

        slot_mappings: for each task a GPU slot for each token of its mask, in order; whole blocks.
        swa_slot_mappings: for each task None, or slots for the last blocks of its window.  A single id may
        come with its mappings themselves.  as_batch: several tasks of one kind become a new one.
        layerwise_transfer: loads signal the eventfds of counter_id layer by layer; what has nothing to load
        signals none.  Returns the ids to wait for.

        ValueError, and no task is changed, if something does not fit.  ValueError also for a layerwise
        load that has failed already, whose layers nobody would signal: do not wait for them.
        """
        ids, mappings, swa_mappings = _listed(task_ids), slot_mappings, swa_slot_mappings
        if isinstance(task_ids, (int, np.integer)):
            mappings, swa_mappings = _of_one(mappings), _of_one(swa_mappings)
        elif swa_mappings is None:
            swa_mappings = [None] * len(ids)
        if not len(ids) == len(mappings) == len(swa_mappings):
            raise ValueError(
                f"slot_mappings: {len(mappings)} and swa_slot_mappings: {len(swa_mappings)} given "
                f"for {len(ids)} tasks"
            )
        launches = [
            Launch(
                task_id,
                gpu_blocks_of("slot_mappings", full, self._block),
                None if swa is None else gpu_blocks_of("swa_slot_mappings", swa, self._block),
            )
            for task_id, full, swa in zip(ids, mappings, swa_mappings, strict=True)
        ]
        return self._backend.launch(
            launches,
            as_batch=bool(as_batch),
            layerwise=bool(layerwise_transfer),
            counter_id=operator.index(counter_id),
        )

    def get_async(
        self, token_ids: Any, slot_mapping: Any, token_mask: Any = None, namespace: Namespace = None
    ) -> int:
        """get_match and launch in one; slot_mapping: a slot for each token, or for each wanted one."""
        task_id, mask = self.get_match(token_ids, token_mask, namespace=namespace)
        return self._launch_moved(task_id, mask, slot_mapping, token_mask)

    def put_async(
        self, token_ids: Any, slot_mapping: Any, token_mask: Any = None, namespace: Namespace = None
    ) -> int:
        """put_match and launch in one; slot_mapping: a slot for each token, or for each wanted one."""
        task_id, mask = self.put_match(token_ids, token_mask, namespace=namespace)
        return self._launch_moved(task_id, mask, slot_mapping, token_mask)

    def _launch_moved(self, task_id: int, moved: Mask, slot_mapping: Any, token_mask: Any) -> int:
        try:
            slots = as_tokens("slot_mapping", slot_mapping)
            wanted = as_mask(token_mask, len(moved))
            if wanted is not None and len(slots) != len(moved):
                moved = moved[wanted]
            if len(slots) != len(moved):
                raise ValueError(f"slot_mapping: {len(slots)} slots given for {len(moved)} tokens")
            self.launch([task_id], [slots[moved]])
        except BaseException:
            self.cancel([task_id])
            raise
        return task_id

    # -- answers

    def try_wait(self, task_ids: int | Sequence[int]) -> dict[int, KVResponse]:
        """Responses of the tasks that are over; a task is forgotten with its response."""
        return self._responses(self._backend.poll(_listed(task_ids)))

    def wait(
        self, task_ids: int | Sequence[int], timeout: float = 20.0, completely: bool = False
    ) -> dict[int, KVResponse]:
        """Responses of all tasks, TIMEOUT for those that still run after timeout seconds.

        completely changes nothing: a task is over when all of it is.
        """
        timeout_s = min(max(float(timeout), 0.0), _MAX_WAIT_S)
        return self._responses(self._backend.wait(_listed(task_ids), timeout_s))

    def cancel(self, task_ids: int | Sequence[int]) -> None:
        """Give tasks up.  One whose transfer runs answers when that is over."""
        self._backend.cancel(_listed(task_ids))

    def _responses(self, answers: dict[int, Answer]) -> dict[int, KVResponse]:
        return {task_id: self._response(task_id, answer) for task_id, answer in answers.items()}

    def _response(self, task_id: int, answer: Answer) -> KVResponse:
        masks = [token_mask_of(member.blocks, self._block, member.num_tokens) for member in answer.members]
        if not masks:  # unknown, still running, or lost with who knew its tokens
            return KVResponse(answer.status, task_id, error=answer.error)
        return KVResponse(answer.status, task_id, masks[0] if len(masks) == 1 else masks, answer.error)


def _of_one(mappings: Any) -> Any:
    """The mappings of a single task as a list; they may be one already."""
    if isinstance(mappings, (list, tuple)) and len(mappings) == 1:
        is_slot = isinstance(mappings[0], (int, np.integer))
        return [mappings] if is_slot else mappings
    return [mappings]


def _listed(task_ids: int | Sequence[int]) -> list[int]:
    return (
        [int(task_ids)] if isinstance(task_ids, (int, np.integer)) else [int(task_id) for task_id in task_ids]
    )
