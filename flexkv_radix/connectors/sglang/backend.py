"""What the plug-in gives to SGLang: the backend `radixshmem`, and word of new weights."""

from __future__ import annotations

from typing import Any

NAME = "radixshmem"
_WEIGHTS_REPLACED = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.flush_cache_after_weight_update"
)


def register() -> None:
    """Register the backend and the hook; repeating does nothing."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if get_radix_cache_factory(NAME) is None:
        register_radix_cache_backend(NAME, make_cache)
        HookRegistry.register(_WEIGHTS_REPLACED, on_new_weights, HookType.AFTER)


def make_cache(context: Any) -> Any:
    """The cache for an engine.  ValueError for a model whose KV is more than one pool of full attention."""
    from flexkv_radix.connectors.sglang.hooks import cache_class

    if context.is_hybrid_swa or context.is_hybrid_ssm:
        raise ValueError(
            f"--radix-cache-backend {NAME}: models with sliding-window or state layers are not supported; "
            "drop the flag"
        )
    return cache_class()(context.params, context.model_config, context.server_args, tp_rank=context.tp_rank)


def on_new_weights(result: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang loaded other weights: its KV of before must not be found any more."""
    cache, version = updater.scheduler.tree_cache, getattr(request, "weight_version", None)
    if hasattr(cache, "new_weights"):
        cache.new_weights(version)
    elif (manager := getattr(getattr(cache, "flexkv_connector", None), "kv_manager", None)) is not None:
        manager.reset(version or "")  # --enable-flexkv
