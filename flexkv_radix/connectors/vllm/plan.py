"""What a vLLM configuration means for the cache: sizes, endpoints, identity.

Read alike by the scheduler and by every worker, in whatever processes they are.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexkv_radix.config import CacheConfig, ModelConfig, RankInfo, dtype_itemsize, dtype_name
from flexkv_radix.connectors.model_options import digest_of, length_of, named
from flexkv_radix.fingerprint import model_identity
from flexkv_radix.settings import load_settings

logger = logging.getLogger(__name__)


class UnsupportedEngine(ValueError):  # noqa: N818 - a reason to serve without the cache
    """This configuration's KV cannot be moved by blocks."""


@dataclass(frozen=True)
class EnginePlan:
    """The cache's view of one vLLM engine (one data-parallel rank of it)."""

    tokens_per_block: int
    num_blocks: int
    block_bytes: int  # all layers and ranks
    num_layers: int
    tp_size: int
    pp_size: int
    is_replicated: bool  # every tensor-parallel rank holds the same bytes
    dtype: str
    register_port: str
    dp_client_id: int = 0  # of this data-parallel rank among all that use one KVServer

    def model_config(self) -> ModelConfig:
        """FlexKV's description of the model, in opaque blocks."""
        return ModelConfig(
            num_layers=self.num_layers,
            dtype=self.dtype,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            use_mla=self.is_replicated,
            block_bytes=self.block_bytes,
        )

    def cache_config(self, identity: str) -> CacheConfig:
        """FlexKV's description of the cache."""
        return CacheConfig(tokens_per_block=self.tokens_per_block, model_identity=identity)


def plan_of(vllm_config: Any, kv_cache_config: Any | None) -> EnginePlan:
    """Plan for an engine whose KV memory was sized.  UnsupportedEngine says what stands in the way.

    kv_cache_config is exact about pages; without it (FlexKVConnectorV1 does not pass it on) their size
    follows from the model.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedEngine(f"{name}={getattr(parallel, name)}: blocks are cut over ranks")
    spec, num_layers = _pages(vllm_config, kv_cache_config)
    dtype = _cache_dtype(vllm_config)
    tokens_per_block = int(spec.block_size if spec else vllm_config.cache_config.block_size)
    page_bytes = int(spec.page_size_bytes) if spec else _page_bytes(model, parallel, tokens_per_block, dtype)
    replicated = bool(model.use_mla)
    return EnginePlan(
        tokens_per_block=tokens_per_block,
        num_blocks=int(vllm_config.cache_config.num_gpu_blocks),
        block_bytes=page_bytes * num_layers * (1 if replicated else parallel.tensor_parallel_size),
        num_layers=num_layers,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        is_replicated=replicated,
        dtype=dtype,
        register_port=f"ipc://{tempfile.gettempdir()}/radixshmem-{vllm_config.kv_transfer_config.engine_id}",
        dp_client_id=_dp_client_id(parallel),
    )


def _dp_client_id(parallel: Any) -> int:
    """Ranks of a dense model are engines with data_parallel_size 1 each: the index alone tells them apart."""
    dp_size = int(getattr(parallel, "data_parallel_size", 1))
    dp_rank = int(getattr(parallel, "data_parallel_index", 0))
    instance_id = load_settings().instance_id
    return RankInfo(ModelConfig(dp_size=dp_size), dp_rank=dp_rank, instance_id=instance_id).dp_client_id


def _pages(vllm_config: Any, kv_cache_config: Any | None) -> tuple[Any, int]:
    """(what a layer's page is, layers of all stages)."""
    total = int(vllm_config.model_config.get_total_num_hidden_layers())
    if kv_cache_config is None:
        return None, total
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedEngine(f"{len(groups)} groups of KV blocks; give --disable-hybrid-kv-cache-manager")
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1  # then a group has one stage's layers
    return groups[0].kv_cache_spec, total if is_staged else len(groups[0].layer_names)


def _page_bytes(model: Any, parallel: Any, tokens_per_block: int, dtype: str) -> int:
    """Bytes of one block of one layer of one rank: K and V of its heads, or one latent vector (MLA)."""
    vectors = 1 if model.use_mla else 2 * int(model.get_num_kv_heads(parallel))
    return tokens_per_block * vectors * int(model.get_head_size()) * dtype_itemsize(dtype)


def _cache_dtype(vllm_config: Any) -> str:
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return dtype_name(vllm_config.model_config.dtype) if cache_dtype == "auto" else cache_dtype


def identity_of(vllm_config: Any, engine_version: str) -> str:
    """Identity of the model as this engine stores it; "" with a warning if its files cannot be read."""
    model = vllm_config.model_config
    try:
        return model_identity(
            _weights_dir(model, vllm_config.load_config),
            full=load_settings().fingerprint == "full",
            revision=str(model.revision or ""),
            quantization=str(model.quantization or ""),
            dtype=model.dtype,
            engine=f"vllm-{engine_version}",
            attention_backend=_block_format(vllm_config),
            hf_config=digest_of(model.hf_config),
            options=digest_of(_options(vllm_config)),
        )
    except (OSError, ValueError) as error:
        logger.warning(
            "the weights of %s cannot be told from others', which is unsafe: %s", model.model, error
        )
        return ""


def _options(vllm_config: Any) -> dict[str, Any]:
    """What the engine's options make of a prompt's KV, beyond the model's configuration."""
    model = vllm_config.model_config
    return {
        "longest_request": length_of(model.hf_config, getattr(model, "max_model_len", None)),
        "has_dummy_weights": str(getattr(vllm_config.load_config, "load_format", "")) == "dummy",
        "model": named(model, "disable_sliding_window", "quantization_config", "model_class_overrides"),
        "media": named(
            getattr(model, "multimodal_config", None),
            "mm_processor_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype",
        ),
        "cache": named(vllm_config.cache_config, "sliding_window", "kv_cache_dtype_skip_layers"),
        "attention": named(
            getattr(vllm_config, "attention_config", None),
            "backend_per_kind", "indexer_kv_dtype", "use_non_causal", "hisparse_config",
        ),
    }  # fmt: skip


def _weights_dir(model: Any, load_config: Any) -> Path:
    """Directory of the weights, of the local hub cache for a name."""
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.model, revision=model.revision, cache_dir=load_config.download_dir, local_files_only=True
        )
    )


def _block_format(vllm_config: Any) -> str:
    """Whatever orders the bytes inside a block: device, instruction set, backend, layout, dtype."""
    has_cuda = torch.cuda.is_available()
    parts = {
        "device": torch.cuda.get_device_capability() if has_cuda else torch.backends.cpu.get_cpu_capability(),
        "backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "layout": getattr(vllm_config.cache_config, "kv_cache_layout", None),
        "dtype": _cache_dtype(vllm_config),
    }
    return repr(parts)
