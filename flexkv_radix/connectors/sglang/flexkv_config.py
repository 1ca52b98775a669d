"""An SGLang engine's configuration in FlexKV's terms.  Imports nothing of SGLang."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flexkv_radix.config import CacheConfig, ModelConfig, RankInfo, dtype_name
from flexkv_radix.connectors.model_options import digest_of, length_of, named
from flexkv_radix.fingerprint import model_identity
from flexkv_radix.settings import FlexKVSettings, load_settings
from flexkv_radix.start import gpu_register_port_of

logger = logging.getLogger(__name__)

_SOCKET_VARIABLE = "FLEXKV_LAYERWISE_EVENTFD_SOCKET"


class FlexKVConfig:
    """Names as SGLang's connector reads them; post_init_from_sglang_config() fills the two configurations."""

    def __init__(self, settings: FlexKVSettings) -> None:
        self.settings = settings
        self.server_recv_port = settings.server_recv_port
        self.model_config = ModelConfig()
        self.cache_config = CacheConfig()

    @classmethod
    def from_env(cls) -> FlexKVConfig:
        """Settings from FLEXKV_* variables and FLEXKV_CONFIG_PATH."""
        return cls(load_settings())

    @property
    def gpu_register_port(self) -> str:
        """Where the ranks of this engine register their KV tensors."""
        return gpu_register_port_of(self.server_recv_port)

    def post_init_from_sglang_config(
        self,
        *,
        sglang_config: Any,
        server_args: Any,
        page_size: int,
        tp_rank: int,
        pp_rank: int = 0,
        dp_rank: int = 0,
        attn_cp_rank: int = 0,
    ) -> RankInfo:
        """Read SGLang's ModelConfig and ServerArgs; returns which rank this process is.

        Collective: every rank of the engine calls it.
        """
        self._name_endpoints()
        self.model_config = _model_config(sglang_config, server_args)
        identity = _identity(sglang_config, server_args, full=self.settings.fingerprint == "full")
        self.cache_config = CacheConfig(tokens_per_block=page_size, model_identity=identity)
        model = self.model_config
        if model.dp_size > 1:  # SGLang does not tell it: with DP attention, the ranks are cut into groups
            dp_rank = tp_rank // (model.tp_size // model.dp_size)
        ranks_per_node = max(1, model.tp_size * model.pp_size // model.nnodes)
        global_rank = pp_rank * model.tp_size + tp_rank
        return RankInfo(
            model_config=model,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            dp_rank=dp_rank,
            attn_tp_rank=tp_rank % model.num_head_ranks,
            attn_cp_rank=attn_cp_rank,
            node_rank=int(server_args.node_rank),
            local_rank=global_rank % ranks_per_node,
            instance_id=self.settings.instance_id,
        )

    def _name_endpoints(self) -> None:
        """Endpoints of this engine alone, unless they were set: several engines share a node."""
        engine = f"{tempfile.gettempdir()}/flexkv_{_engine_number()}"
        if "server_recv_port" not in self.settings.model_fields_set:
            self.server_recv_port = f"ipc://{engine}"
        os.environ.setdefault(_SOCKET_VARIABLE, f"{engine}_layers.sock")


class TransferManagerOnRemote:
    """FlexKV's transfer process on the further nodes of an engine that spans several."""

    @staticmethod
    def create_process(*_: object, **__: object) -> NoReturn:
        """Always raises: an engine's ranks must be on one node."""
        raise NotImplementedError(
            "engines whose tensor or pipeline parallel ranks span several nodes are not supported; "
            "drop --enable-flexkv"
        )


def _engine_number() -> int:
    """The same number on every rank of an engine: the process id of its first rank."""
    number = torch.tensor([os.getpid()], dtype=torch.int64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(number, src=0, group=dist.new_group(backend="gloo"))
    return int(number.item())


def _model_config(model: Any, server_args: Any) -> ModelConfig:
    use_mla = getattr(model.attention_arch, "name", "") == "MLA"
    tp_size, cp_size = int(server_args.tp_size), int(getattr(server_args, "attn_cp_size", 1) or 1)
    dp_size = int(server_args.dp_size) if getattr(server_args, "enable_dp_attention", False) else 1
    return ModelConfig(
        num_layers=int(model.num_hidden_layers),
        num_kv_heads=1 if use_mla else int(model.get_total_num_kv_heads()),
        head_size=int(model.kv_lora_rank + model.qk_rope_head_dim) if use_mla else int(model.head_dim),
        dtype=_cache_dtype(model, server_args),
        tp_size=tp_size,
        pp_size=int(server_args.pp_size),
        dp_size=dp_size,
        use_mla=use_mla,
        attn_tp_size=max(1, tp_size // dp_size // cp_size),
        attn_cp_size=cp_size,
        nnodes=int(server_args.nnodes),
    )


def _cache_dtype(model: Any, server_args: Any) -> str:
    dtype = str(server_args.kv_cache_dtype)
    return dtype_name(model.dtype) if dtype == "auto" else dtype


def _identity(model: Any, server_args: Any, *, full: bool) -> str:
    """Identity of the model as this engine stores it; "" with a warning if its files cannot be read."""
    path = Path(model.model_path)
    try:
        if not path.is_dir():
            path = _hub_dir(model, server_args)
        return model_identity(
            path,
            full=full,
            revision=str(model.revision or ""),
            quantization=str(model.quantization or ""),
            dtype=model.dtype,
            engine="sglang",  # no version: the pools' format is FlexKV's, not opaque
            hf_config=digest_of(getattr(model, "hf_config", None)),
            options=digest_of(_options(model, server_args)),
        )
    except (OSError, ValueError) as error:
        logger.warning("the weights of %s cannot be told from others', which is unsafe: %s", path, error)
        return ""


def _options(model: Any, server_args: Any) -> dict[str, Any]:
    """What the engine's options make of a prompt's KV, beyond the model's configuration."""
    scales = getattr(server_args, "quantization_param_path", None)
    overrides = getattr(server_args, "json_model_override_args", None)
    length = length_of(getattr(model, "hf_config", None), getattr(model, "context_len", None))
    return {
        "longest_request": length,
        "has_dummy_weights": str(getattr(server_args, "load_format", "")) == "dummy",
        "overrides": json.loads(overrides) if overrides else {},
        "kv_scales": hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else "",
        "model": named(server_args, "torchao_config", "rl_quant_profile", "mm_process_config"),
    }


def _hub_dir(model: Any, server_args: Any) -> Path:
    """Directory of a model that was downloaded from the hub."""
    from huggingface_hub import snapshot_download

    directory = snapshot_download(
        model.model_path, revision=model.revision, cache_dir=server_args.download_dir, local_files_only=True
    )
    return Path(directory)
