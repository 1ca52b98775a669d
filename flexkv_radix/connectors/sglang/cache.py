"""SGLang's radix cache in device memory, with the node's cache behind it.

    match_prefix      device tree, then lookup: host_hit_length tokens more can be had, and are pinned
    init_load_back    the request is scheduled: allocate slots, load, hang them into the device tree
    store_finished    the request is over: lock its node and store it until the transfer is done

Every decision that changes an allocator or the tree is the leader's, agreed on by all ranks (ranks.py).
The shape of the last two differs between SGLang's versions: hooks.py.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.disaggregation import kv_events
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from flexkv_radix.config import RankInfo
from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.connectors.events import EventBuffer
from flexkv_radix.connectors.namespace import request_namespace
from flexkv_radix.connectors.readiness import await_ready
from flexkv_radix.connectors.sglang.flexkv_config import FlexKVConfig
from flexkv_radix.connectors.sglang.layerwise import LayerwiseLoads
from flexkv_radix.connectors.sglang.ranks import Ranks
from flexkv_radix.layerwise import build_layerwise_eventfd_socket_path
from flexkv_radix.layout import KVCacheLayout, KVCacheLayoutType
from flexkv_radix.manager import KVManager
from flexkv_radix.tp_client import KVTPClient

_READY_TIMEOUT_S = 30.0


class RadixShmemCache(RadixCache):  # type: ignore[misc]  # SGLang may not be installed
    """See the module's comment.  Subclasses adapt it to a version of SGLang."""

    def __init__(self, params: Any, model_config: Any, server_args: Any, *, tp_rank: int) -> None:
        self._shared: SharedCache | None = None  # RadixCache's constructor calls reset()
        super().__init__(params)
        self._ranks = Ranks([params.pp_cache_group, params.attn_cp_cache_group, params.attn_tp_cache_group])
        self._events = EventBuffer(kv_events)
        self._stores: dict[int, TreeNode] = {}  # number of a store -> the node it reads
        self._num_stores = 0
        self._looked_up: dict[Any, RadixKey] = {}  # request -> what its pinned match is for
        config = FlexKVConfig.from_env()
        rank = config.post_init_from_sglang_config(
            sglang_config=model_config,
            server_args=server_args,
            page_size=self.page_size,
            tp_rank=tp_rank,
            pp_rank=params.pp_rank,
            attn_cp_rank=params.attn_cp_rank,
        )
        if self._ranks.is_leader:
            manager = KVManager(
                config.model_config,
                config.cache_config,
                dp_client_id=rank.dp_client_id,
                server_recv_port=config.server_recv_port,
                gpu_register_port=config.gpu_register_port,
                event_collector=self._events if params.enable_kv_cache_events else None,
            )
            manager.start()
            self._shared = SharedCache(manager, self.page_size)
        self._client = KVTPClient(
            config.gpu_register_port,
            dp_client_id=rank.dp_client_id,
            device_id=rank.local_rank,
            pp_rank=rank.pp_rank,
        )
        self._register(config)
        self._layers = self._layerwise_loads(config, rank) if self._await_ready(config) else None

    # -- start

    def _await_ready(self, config: FlexKVConfig) -> bool:
        """Whether the cache is there: the leader knows.  RuntimeError on every rank if it must be."""
        refusal: RuntimeError | None = None
        is_ready = False
        try:
            is_ready = self._shared is not None and await_ready(
                self._shared, _READY_TIMEOUT_S, config.settings
            )
        except RuntimeError as error:
            refusal = error
        answer = self._ranks.agree(-1 if refusal else int(is_ready))
        if answer < 0:
            self._client.close()
            raise refusal or RuntimeError("FLEXKV_STRICT=1: the engine's first rank was refused the KV cache")
        return answer == 1

    def _register(self, config: FlexKVConfig) -> None:
        """Let the transfer worker map this rank's KV tensors."""
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        kv_dim = config.model_config.kv_dim
        tensors = list(pool.kv_buffer) if kv_dim == 1 else [*pool.k_buffer, *pool.v_buffer]
        num_slots, num_heads, head_size = tensors[0].shape
        layout = KVCacheLayout(
            KVCacheLayoutType.LAYERFIRST,
            num_layer=len(tensors) // kv_dim,
            num_block=num_slots // self.page_size,
            tokens_per_block=self.page_size,
            num_head=num_heads,
            head_size=head_size,
            kv_dim=kv_dim,
        )
        self._client.register_to_server(tensors, layout)

    def _layerwise_loads(self, config: FlexKVConfig, rank: RankInfo) -> LayerwiseLoads | None:
        if not config.settings.enable_layerwise_transfer:
            return None
        model = config.model_config
        path = build_layerwise_eventfd_socket_path(rank.dp_client_id, rank.pp_rank, model)
        loads = LayerwiseLoads(
            rank.num_layers_per_pp_stage, path, rank=rank.tp_rank_per_node, num_ranks=model.tp_size_per_node
        )
        self.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(loads)
        return loads

    # -- loads

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        """SGLang's result, with host_hit_length tokens that a load could bring after the device's.

        Without a request nothing is looked up: nobody would release it.
        """
        result = super().match_prefix(params)
        if self.disable or self.is_eagle or params.req is None:
            return result
        self._drain()
        key, handle = params.key.page_aligned(self.page_size), params.req.cache_request_handle
        num_device_tokens = self.num_device_tokens(result)
        hit_tokens = self._ranks.agree(self._lookup(handle, key, num_device_tokens))
        if hit_tokens == 0:
            self._looked_up.pop(handle, None)
            return result
        # The request's own key grows with its output.
        tokens = key.raw_token_ids()[: num_device_tokens + hit_tokens]
        self._looked_up[handle] = RadixKey(tokens, key.extra_key, cache_salt=key.cache_salt)
        return result._replace(host_hit_length=hit_tokens)

    def _lookup(self, handle: Any, key: RadixKey, num_device_tokens: int) -> int:
        if self._shared is None:
            return 0
        return self._shared.lookup(handle, key.raw_token_ids(), num_device_tokens, namespace_of(key))

    def load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """Load what match_prefix promised: (its slots, the node that ends it), all of it or nothing."""
        handle, num_tokens = params.req.cache_request_handle, params.host_hit_length
        key = self._looked_up.pop(handle, None)
        nothing = torch.empty((0,), dtype=torch.int64, device=self.device), params.best_match_node
        if key is None or num_tokens == 0:
            self._release(handle)
            return nothing
        device = super().match_prefix(MatchPrefixParams(key=key))
        prefix = self.device_indices(device)
        if len(prefix) == len(key):  # another request of this batch loaded it
            self._release(handle)
            return prefix[len(key) - num_tokens :], device.last_device_node
        if len(prefix) != len(key) - num_tokens:
            self._release(handle)
            return nothing
        slots = self._allocate(num_tokens)
        if slots is None:
            self._release(handle)
            return nothing
        if not self._load(handle, slots):
            self.token_to_kv_pool_allocator.free(slots)
            return nothing
        inserted = self.insert(InsertParams(key=key, value=torch.cat([prefix, slots])))
        return slots, inserted.last_device_node

    def _allocate(self, num_tokens: int) -> torch.Tensor | None:
        missing = num_tokens - self.token_to_kv_pool_allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = self.token_to_kv_pool_allocator.alloc(num_tokens)
        return slots

    def _load(self, handle: Any, slots: torch.Tensor) -> bool:
        """Load into slots: in place when this returns, or layer by layer before the forward reads them."""
        counter_id = self._take_counter()
        ok = self._ranks.agree(int(self._start_load(handle, slots, counter_id))) == 1
        if not ok and counter_id is not None and self._layers is not None:
            self._layers.drop_counter(counter_id)
        return ok

    def _take_counter(self) -> int | None:
        """The counter that a load will signal on every rank, None where it has to be loaded at once.

        All ranks have taken it when this returns: what is signalled earlier would be lost.
        """
        if self._layers is None:
            return None
        counter_id = self._ranks.agree(self._layers.free_counter())
        taken = self._layers.take_counter(counter_id)
        if self._ranks.all_did(taken):
            return counter_id
        if taken:
            self._layers.drop_counter(counter_id)
        return None

    def _start_load(self, handle: Any, slots: torch.Tensor, counter_id: int | None) -> bool:
        if self._shared is None:
            return False
        mapping = slots.to("cpu", torch.int64).numpy()
        if counter_id is not None:
            return self._shared.start_load(handle, mapping, layerwise=True, counter_id=counter_id)
        return self._shared.start_load(handle, mapping) and self._shared.finish_load(handle)

    def _release(self, handle: Any) -> None:
        """Drop what match_prefix holds for a request."""
        self._looked_up.pop(handle, None)
        if self._shared is not None:
            self._shared.release(handle)

    # -- stores

    def store_finished(self, key: RadixKey) -> None:
        """Store the KV of key, which is in the device tree; its node stays locked until that is done."""
        if self.disable or self.is_eagle:
            return
        self._drain()
        device = super().match_prefix(MatchPrefixParams(key=key))
        slots, node = self.device_indices(device), device.last_device_node
        self.inc_lock_ref(node)
        self._num_stores += 1
        if self._ranks.agree(int(self._start_store(self._num_stores, key, slots))):
            self._stores[self._num_stores] = node
        else:
            self.dec_lock_ref(node)

    def _start_store(self, number: int, key: RadixKey, slots: torch.Tensor) -> bool:
        if self._shared is None:
            return False
        tokens, mapping = key.raw_token_ids()[: len(slots)], slots.to("cpu", torch.int64).numpy()
        return self._shared.start_store(number, tokens, mapping, namespace_of(key))

    def _drain(self) -> None:
        """Unlock what has been stored."""
        done: list[int] = []
        if self._shared is not None:
            done = [number for number in self._shared.poll().stores if isinstance(number, int)]
        for number in self._ranks.agree_all(done) if self._stores else ():
            self.dec_lock_ref(self._stores.pop(number))

    # -- SGLang's other calls

    def evict(self, params: EvictParams) -> EvictResult:
        """Nodes whose store is over may go too."""
        if self._stores:
            self._drain()
        return super().evict(params)

    def check_hicache_events(self) -> None:
        """Each scheduler step, with --enable-flexkv."""
        self._drain()

    def take_events(self) -> list[Any]:
        """Those of the device tree, then those of the node's cache (medium CPU)."""
        return [*super().take_events(), *self._events.take()]

    def release_aborted_request(self, handle: Any) -> None:
        """The request will not be scheduled again."""
        self._release(handle)

    def reset(self) -> None:
        """Forget the device tree (SGLang's flush_cache); what is stored stays."""
        if self._shared is not None:
            self._shared.finish_all()  # the slots of running transfers are about to be handed out again
        self._stores = {}
        for handle in list(getattr(self, "_looked_up", ())):
            self._release(handle)
        super().reset()

    def new_weights(self, version: str | None) -> None:
        """The engine's weights were replaced: stored KV of other versions is not its own any more."""
        if self._shared is not None:
            self._shared.reset(version or "")

    def release_host_resources(self) -> None:
        """Graceful shutdown."""
        if self._shared is not None:
            self._shared.close()
        self._client.close()

    # -- what differs between versions of SGLang

    def num_device_tokens(self, result: Any) -> int:
        """Tokens in device memory of a match result."""
        raise NotImplementedError

    def device_indices(self, result: Any) -> torch.Tensor:
        """Their slots, int64."""
        raise NotImplementedError


def namespace_of(key: RadixKey) -> list[str] | None:
    """SGLang's extra_key holds an adapter's id too."""
    return request_namespace(salt=key.cache_salt, extra=key.extra_key)
