"""The radix cache in the shapes that versions of SGLang ask for."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from flexkv_radix.connectors.sglang.cache import RadixShmemCache


class FinishedRequestCache(RadixShmemCache):
    """SGLang up to 0.5.21: match results carry slots, cache_finished_req ends a request."""

    def num_device_tokens(self, result: Any) -> int:
        return len(result.device_indices)

    def device_indices(self, result: Any) -> torch.Tensor:
        indices: torch.Tensor = result.device_indices
        return indices

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        return self.load_back(params)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **lengths: Any) -> None:
        super().cache_finished_req(req, is_insert=is_insert, **lengths)
        self._release(req.cache_request_handle)
        if is_insert and not self.disable_finished_insert:
            tokens = (req.origin_input_ids + req.output_ids)[: req.kv.kv_committed_len]
            self.store_finished(key_of(req, tokens))


class CheckpointCache(RadixShmemCache):
    """SGLang from 0.5.22: match results count tokens, checkpoint inserts, on_release ends a request."""

    def num_device_tokens(self, result: Any) -> int:
        return int(result.device_prefix_len)

    def device_indices(self, result: Any) -> torch.Tensor:
        indices: torch.Tensor = self.path_device_indices(result.last_device_node)
        return indices

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, TreeNode]:
        slots, node = self.load_back(params)
        return len(slots), node

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        if req.finished():
            tokens = (req.origin_input_ids + req.output_ids)[: min(req.kv.kv_committed_len, up_to)]
            self.store_finished(key_of(req, tokens))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self._release(req.cache_request_handle)


def key_of(req: Any, tokens: Any) -> RadixKey:
    """Key of a request's tokens in the device tree."""
    return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)


def cache_class() -> type[RadixShmemCache]:
    """The class for the installed SGLang."""
    return CheckpointCache if hasattr(RadixCache, "checkpoint") else FinishedRequestCache
