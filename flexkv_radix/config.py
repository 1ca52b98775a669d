"""What a model's KV looks like and how the cache is used: FlexKV's configuration objects.

Plain data without torch.  settings.py reads the environment and YAML; attach.py turns these into a
Geometry.  Counts (`num_cpu_blocks`, `swa.num_slots`) are the radix-server's: attaching overwrites them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexkv_radix.layout import LayerGroupSpec

_ITEMSIZE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "float": 4, "int32": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for torch.bfloat16, "bfloat16" or "torch.bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_itemsize(dtype: Any) -> int:
    """Bytes of one element of a torch dtype or of the dtype of that name."""
    itemsize = getattr(dtype, "itemsize", None)
    if isinstance(itemsize, int):
        return itemsize
    name = dtype_name(dtype)
    if name not in _ITEMSIZE_BYTES:
        raise ValueError(f"dtype: {name!r} is none of {', '.join(_ITEMSIZE_BYTES)}")
    return _ITEMSIZE_BYTES[name]


@dataclass
class ModelConfig:
    """KV shape and parallel split of a model.

    num_layers and num_kv_heads are the model's, over all ranks.  kv_dim is 1 for MLA (`use_mla`), whose
    KV every tensor-parallel rank holds whole.  Where one (layers, heads, head_size) does not describe
    the model, layer_groups does, per rank.  block_bytes > 0 overrides both: bytes of one opaque block,
    all layers and ranks.  Fields may be set one by one: what follows from them is worked out when asked.
    """

    num_layers: int = 1
    num_kv_heads: int = 1
    head_size: int = 1
    kv_dim: int = 2
    dtype: Any = "bfloat16"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    use_mla: bool = False
    attn_tp_size: int = 0  # ranks that split the heads, where attention is data parallel; 0: tp_size
    attn_cp_size: int = 1
    nnodes: int = 1
    master_host: str = ""
    master_ports: tuple[str, ...] = ()
    layer_groups: tuple[LayerGroupSpec, ...] = ()
    block_bytes: int = 0

    def __post_init__(self) -> None:
        if self.use_mla:
            self.kv_dim = 1
        if self.kv_dim not in (1, 2):
            raise ValueError(f"kv_dim: {self.kv_dim} is neither 1 nor 2")
        self.use_mla = self.kv_dim == 1
        for name in (
            "num_layers",
            "num_kv_heads",
            "head_size",
            "tp_size",
            "pp_size",
            "dp_size",
            "attn_cp_size",
            "nnodes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "block_bytes" not in self.__dict__:  # the last field: __init__ is not through
            return
        if name == "use_mla":
            self.__dict__["kv_dim"] = 1 if value else 2
        elif name == "kv_dim":
            self.__dict__["use_mla"] = value == 1

    @property
    def num_head_ranks(self) -> int:
        """Ranks that split the heads."""
        return self.attn_tp_size or self.tp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of one data-parallel group: each registers its KV tensors."""
        return self.pp_size * self.num_head_ranks * self.attn_cp_size

    @property
    def tp_size_per_node(self) -> int:
        return max(1, self.tp_size // self.nnodes)

    @property
    def token_size_in_bytes(self) -> int:
        """Bytes of one token's KV, all layers and heads, each head counted once."""
        return self.num_layers * self.kv_dim * self.num_kv_heads * self.head_size * dtype_itemsize(self.dtype)

    def full_slot_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one block of the FULL component, all ranks."""
        if self.block_bytes:
            return self.block_bytes
        groups = self.layer_groups or (self._whole_model(),)
        return sum(self._all_ranks(group.block_bytes(tokens_per_block), group.kv_dim) for group in groups)

    def _whole_model(self) -> LayerGroupSpec:
        """All layers as one group, as one rank sees it (of all pipeline stages)."""
        ranks = 1 if self.kv_dim == 1 else self.num_head_ranks
        heads = -(-self.num_kv_heads // ranks)  # fewer heads than ranks: each rank has a copy of one
        return LayerGroupSpec(self.num_layers, heads, self.head_size, self.kv_dim, dtype_itemsize(self.dtype))

    def _all_ranks(self, rank_bytes: int, kv_dim: int) -> int:
        return rank_bytes if kv_dim == 1 else rank_bytes * self.num_head_ranks


@dataclass
class SWAPoolConfig:
    """KV of the sliding-window layers, kept in a pool of its own.

    sliding_window is in tokens.  Shape as in ModelConfig; block_bytes > 0 overrides it.
    """

    sliding_window: int
    num_layers: int = 1
    num_kv_heads: int = 1
    head_size: int = 1
    kv_dim: int = 2
    dtype: Any = "bfloat16"
    block_bytes: int = 0
    num_slots: int = 0  # the server's

    def window_blocks(self, tokens_per_block: int) -> int:
        """Blocks that hold the last sliding_window tokens before a block boundary."""
        if self.sliding_window < 1:
            raise ValueError(f"swa.sliding_window: {self.sliding_window} tokens is not positive")
        return -(-self.sliding_window // tokens_per_block)

    def slot_bytes(self, tokens_per_block: int, model: ModelConfig) -> int:
        """Bytes of one block of the SWA component, all ranks of model."""
        if self.block_bytes:
            return self.block_bytes
        shape = ModelConfig(
            self.num_layers, self.num_kv_heads, self.head_size, self.kv_dim, self.dtype,
            tp_size=model.tp_size, attn_tp_size=model.attn_tp_size,
        )  # fmt: skip
        return shape.full_slot_bytes(tokens_per_block)


@dataclass
class CacheConfig:
    """How the cache is used.

    tokens_per_block must equal the engine's block size.  model_identity says what the bytes mean
    (fingerprint.py); engines with another one never share.  The SSD and remote tiers do not exist here;
    their switches are kept so that callers can ask.
    """

    tokens_per_block: int = 16
    num_cpu_blocks: int = 0  # the server's
    swa: SWAPoolConfig | None = None
    model_identity: str = ""
    cpu_cache_gb: float = 0.0  # warned about: the size is radix-server's --data-bytes
    enable_cpu: bool = True
    enable_ssd: bool = False
    enable_remote: bool = False
    enable_gds: bool = False
    enable_kv_sharing: bool = False  # whether prefetch can bring blocks of other nodes: the server's
    num_ssd_blocks: int = 0
    num_remote_blocks: int = 0
    node_rank: int = 0  # this node among the cluster's: the server's
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1:
            raise ValueError(f"tokens_per_block: {self.tokens_per_block} is not positive")


@dataclass
class RankInfo:
    """Which rank of which engine a process is."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    attn_tp_rank: int = 0
    attn_cp_rank: int = 0
    node_rank: int = 0
    local_rank: int = 0  # its device on this node
    instance_id: int = 0

    @property
    def dp_client_id(self) -> int:
        """Number of this rank's data-parallel group among all instances of the node."""
        return self.instance_id * self.model_config.dp_size + self.dp_rank

    @property
    def num_layers_per_pp_stage(self) -> int:
        """Layers of this rank's stage; the first stages take the rest of an uneven split."""
        layers, rest = divmod(self.model_config.num_layers, self.model_config.pp_size)
        return layers + (self.pp_rank < rest)

    @property
    def tp_rank_per_node(self) -> int:
        return self.tp_rank % self.model_config.tp_size_per_node

    @property
    def pp_size_per_node(self) -> int:
        return max(1, self.model_config.pp_size // self.model_config.nnodes)


def register_endpoint(gpu_register_port: str, dp_client_id: int) -> str:
    """Unix socket at which the ranks of one engine hand their KV tensors over.

    gpu_register_port is `ipc://<path>` or a path; file descriptors cannot travel otherwise.
    """
    path = gpu_register_port.removeprefix("ipc://")
    if not path.startswith("/"):
        raise ValueError(
            f"gpu_register_port: {gpu_register_port!r} is not ipc://<absolute path>; KV tensors are handed "
            "over through a Unix socket (set FLEXKV_SERVER_RECV_PORT=ipc:///...)"
        )
    return f"{path}_{dp_client_id}"
