"""The scheduler's side of the vLLM connector.  Imports nothing of vLLM: it is handed the engine's objects.

    get_num_new_matched_tokens   lookup: pins what can be loaded
    update_state_after_alloc     the blocks are known: the load is planned, or the pin dropped
    build_connector_meta         starts the planned loads; tells the workers what ended
    request_finished             stores; the blocks stay until the workers reported the end

Transfers run in a process of their own, so the workers only repeat to vLLM what the metadata of a step
says: completions then travel like those of any connector: through all ranks, MultiConnector and
every process mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.connectors.namespace import request_namespace
from flexkv_radix.connectors.vllm.plan import EnginePlan
from flexkv_radix.events import EventCollector
from flexkv_radix.fingerprint import model_identity
from flexkv_radix.manager import KVManager


class Request(Protocol):
    """What is used of a vLLM request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int  # counted as computed, but a step still runs
    cache_salt: str | None
    all_token_ids: Any
    lora_request: Any
    mm_features: Any
    prompt_embeds: Any
    skip_reading_prefix_cache: bool


@dataclass
class StepReport:
    """What the workers are to tell vLLM in a step."""

    finished_loads: set[str] = field(default_factory=set)
    finished_stores: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _PlannedLoad:
    request_id: str
    block_ids: list[int]


def manager_of(plan: EnginePlan, identity: str, event_collector: EventCollector | None = None) -> KVManager:
    """The KVManager of the engine that plan describes, not started.  identity: of its model (plan.py)."""
    return KVManager(
        plan.model_config(),
        plan.cache_config(identity),
        dp_client_id=plan.dp_client_id,
        gpu_register_port=plan.register_port,
        event_collector=event_collector,
    )


class SchedulerSide:
    """Loads and stores of one engine's requests.

    load_async: a request waits for its load while others run; otherwise its first step waits.
    loads, stores: what the engine's role allows.
    """

    def __init__(
        self, cache: SharedCache, *, load_async: bool = True, loads: bool = True, stores: bool = True
    ) -> None:
        self._cache = cache
        self._loads, self._stores = loads, stores
        self._block_size = cache.tokens_per_block
        self._load_async = load_async
        self._computed: dict[str, int] = {}  # request -> tokens in the engine when it was looked up
        self._planned: list[_PlannedLoad] = []
        self._loading: dict[str, list[int]] = {}  # request -> blocks that a load fills
        self._gave_up: set[str] = set()  # requests whose load failed: the next might fail as well, for ever
        self._report = StepReport()

    # -- loads

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded after num_computed_tokens (whole blocks), and whether asynchronously.

        At least one token is left to compute: its logits are the next token's.
        """
        if not self._may_load(request):
            return 0, False
        tokens = request.all_token_ids[: request.num_tokens - 1]
        hit = self._cache.lookup(request.request_id, tokens, num_computed_tokens, namespace_of(request))
        self._computed[request.request_id] = num_computed_tokens
        return hit, self._load_async and hit > 0

    def _may_load(self, request: Request) -> bool:
        is_wanted = self._loads and not request.skip_reading_prefix_cache
        return is_wanted and request.request_id not in self._gave_up and _is_cacheable(request)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Plan the load of num_external_tokens into block_ids (all blocks of the request), or drop the match.

        Called again without tokens once an asynchronous load is in.
        """
        request_id = request.request_id
        first = self._computed.pop(request_id, 0)
        if num_external_tokens == 0:
            self._cache.release(request_id)
            return
        tokens = request.all_token_ids[: request.num_tokens - 1]
        namespace = namespace_of(request)
        if self._cache.lookup(request_id, tokens, first, namespace) != num_external_tokens:
            # vLLM takes less than was offered: match exactly that.
            tokens = tokens[: first + num_external_tokens]
            self._cache.lookup(request_id, tokens, first, namespace)
        size = self._block_size
        blocks = list(block_ids[first // size : (first + num_external_tokens) // size])
        self._planned.append(_PlannedLoad(request_id, blocks))

    def _start_loads(self) -> None:
        for load in self._planned:
            self._loading[load.request_id] = load.block_ids
            if not self._cache.start_load(load.request_id, slots_of(load.block_ids, self._block_size)):
                self._load_ended(load.request_id, ok=False)
            elif not self._load_async:
                self._load_ended(load.request_id, self._cache.finish_load(load.request_id))
        self._planned.clear()

    def _load_ended(self, request_id: str, ok: bool) -> None:
        blocks = self._loading.pop(request_id)
        if self._load_async:
            self._report.finished_loads.add(request_id)
        if not ok:
            self._gave_up.add(request_id)
            self._report.failed_blocks.update(blocks)

    # -- stores

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Store what the request computed.  True: its blocks are read until finished_stores names it."""
        request_id = request.request_id
        self._computed.pop(request_id, None)
        self._gave_up.discard(request_id)
        self._cache.release(request_id)
        if not self._stores or request_id in self._loading or not _is_cacheable(request):
            return False
        num_tokens = min(
            request.num_computed_tokens - request.num_in_flight_tokens, len(block_ids) * self._block_size
        )
        tokens = request.all_token_ids[: max(0, num_tokens)]
        return self._cache.start_store(
            request_id, tokens, slots_of(block_ids, self._block_size), namespace_of(request)
        )

    # -- steps

    def take_report(self) -> StepReport:
        """Start planned loads and see what ended since the last step."""
        self._start_loads()
        completed = self._cache.poll()
        for request_id, ok in completed.loads.items():
            self._load_ended(str(request_id), ok)
        self._report.finished_stores.update(str(request_id) for request_id in completed.stores)
        report, self._report = self._report, StepReport()
        return report


def slots_of(block_ids: Sequence[int], block_size: int) -> npt.NDArray[np.int64]:
    """Slot of each token of the blocks, int64 [blocks * block_size]."""
    first = np.asarray(block_ids, dtype=np.int64) * block_size
    return (first[:, None] + np.arange(block_size, dtype=np.int64)).reshape(-1)


def namespace_of(request: Request) -> list[str] | None:
    """What else than tokens decides the request's KV."""
    lora = request.lora_request
    adapter = _adapter_identity(lora.lora_name, lora.lora_int_id, lora.lora_path) if lora else None
    media = [f"{feature.identifier}@{feature.mm_position.offset}" for feature in request.mm_features or ()]
    return request_namespace(lora=adapter, salt=request.cache_salt, media=media)


@lru_cache(maxsize=1024)
def _adapter_identity(name: str, number: int, path: str) -> str:
    """Name and contents: two engines may call different adapters alike.

    number: vLLM's, another one when the adapter is loaded anew.
    """
    try:
        return f"{name}@{model_identity(path)}"
    except (OSError, ValueError):  # not files of this machine: the name has to do
        return name


def _is_cacheable(request: Request) -> bool:
    """Embeddings given in place of tokens have no tokens to be found by."""
    return request.prompt_embeds is None
