"""The only reader of FLEXKV_* variables and of the YAML file that FLEXKV_CONFIG_PATH names.

Precedence: environment, YAML, default.  YAML refuses a key it does not know.  The environment is never
refused (a launch script may serve several versions): an unknown or no longer applicable variable is
answered by one warning.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from flexkv_radix.config import register_endpoint

logger = logging.getLogger(__name__)

_PREFIX = "FLEXKV_"

# FlexKV's settings for tiers and mechanisms that do not exist here, and what to do instead.
_NOT_APPLICABLE = {
    "cpu_cache_gb": "the size of the cache is radix-server's --data-bytes",
    "num_cpu_blocks": "the number of blocks follows from radix-server's --data-bytes",
    **dict.fromkeys(
        ("ssd_cache_gb", "ssd_cache_dir", "enable_gds", "enable_ssd", "ssd_layout", "iouring_entries",
         "iouring_flags", "max_file_size_gb", "remote_cache_size_mode", "enable_remote", "enable_3rd_remote",
         "enable_p2p_ssd", "remote_layout"),
        "there is no SSD or remote tier",
    ),
    **dict.fromkeys(
        ("enable_p2p_cpu", "redis_host", "redis_port", "redis_password", "node_ttl_seconds", "local_ip",
         "mooncake_config_path", "enable_kv_sharing"),
        "sharing between nodes is set up at the radix-server",
    ),
    **dict.fromkeys(
        ("evict_ratio", "evict_start_threshold", "hit_reward_seconds", "eviction_policy"),
        "eviction is set up at the radix-server (--evict-policy, --background-evict-ratio)",
    ),
    "log_level": "log records go to the engine's own logging, under `flexkv_radix`",
    **dict.fromkeys(
        ("index_accel", "use_ce_transfer_h2d", "use_ce_transfer_d2h", "transfer_num_cta_h2d",
         "transfer_num_cta_d2h", "use_hugepage_cpu_buffer", "use_hugepage_tmp_buffer", "hugepage_size_bytes",
         "enable_mps", "sync_interval"),
        "it is chosen by measurement here",
    ),
}  # fmt: skip

# Variables that are not read here: the name of the YAML file, and what engines' adapters read themselves.
_READ_ELSEWHERE = ("config_path", "layerwise_eventfd_connect_max_retries")


class FlexKVSettings(BaseSettings):
    """One field = one `FLEXKV_<FIELD>` variable = one YAML key."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    radixshmem_server_name: str = Field("/flexkv", description="name of the radix-server to attach")
    enable_radixshmem: bool = Field(True, description="the only mode; false disables the cache")
    strict: bool = Field(False, description="raise instead of disabling the cache when it is refused")
    attach_timeout_s: float = Field(600.0, gt=0, description="how long to wait for the radix-server")
    server_recv_port: str = Field(
        "ipc:///tmp/flexkv_server",
        description="endpoint of the KVServer; where ranks register follows from it",
    )
    server_client_mode: bool = Field(False, description="the same as server_launch_mode=embedded")
    server_launch_mode: Literal["", "embedded", "external"] = Field(
        "", description="go through one KVServer per node, started by the engines or by the operator"
    )
    instance_num: int = Field(1, ge=1, description="instances of the engine on this node")
    instance_id: int = Field(
        0, ge=0, description="number of this instance, from 0: those with one server_recv_port need their own"
    )
    cpu_layout: str = Field("BLOCKFIRST", description="order of a host block: BLOCKFIRST")
    fingerprint: Literal["sampled", "full"] = Field(
        "sampled", description="full: hash every byte of the weights"
    )
    task_ttl_s: float = Field(
        600.0, gt=0, description="after this long an unlaunched or uncollected task is dropped"
    )
    enable_metrics: bool = Field(False, description="serve Prometheus metrics")
    metrics_port: int = Field(8080, ge=0, le=65535, description="port of the metrics on 127.0.0.1")
    enable_trace: bool = Field(False, description="write every call as a line of JSON")
    trace_file_path: str = Field("./flexkv_trace.log", description="where enable_trace writes")
    enable_layerwise_transfer: bool = Field(False, description="loads go layer by layer")
    layerwise_eventfd_socket: str = Field(
        "/tmp/flexkv_layerwise_eventfd.sock", description="eventfd hand-over"
    )
    copy_threads: int = Field(0, ge=0, description="threads that copy CPU tensors; 0: by the number of cores")
    transfer_path: Literal["auto", "rows", "batch", "kernel"] = Field(
        "auto",
        description="what moves CUDA blocks: copy commands for rows, batches of copies, or a kernel",
    )
    transfer_thread_blocks: int = Field(
        0, ge=0, description="CUDA thread blocks of a transfer by a kernel; 0: the measured default"
    )
    transfer_queue_threads: int = Field(
        0, ge=0, le=16, description="threads that queue batches of copies for a GPU; 0: the measured default"
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        """The environment overrides what load_settings() read from YAML and passes to the constructor."""
        return env_settings, init_settings


def load_settings() -> FlexKVSettings:
    """Settings from the environment and YAML.  ValueError names what is wrong and where it was given."""
    path = os.environ.get("FLEXKV_CONFIG_PATH", "")
    _warn_about_environment(os.environ)
    try:
        settings = FlexKVSettings(**_read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        where = f"{_PREFIX}{name.upper()}" if f"{_PREFIX}{name.upper()}" in os.environ else f"{path}: {name}"
        raise ValueError(f"{where}: {first['msg']} (given: {first['input']!r})") from error
    if "instance_num" in settings.model_fields_set and settings.instance_id >= settings.instance_num:
        raise ValueError(
            f"FLEXKV_INSTANCE_ID: {settings.instance_id} given, but instances count from 0 and there are "
            f"FLEXKV_INSTANCE_NUM={settings.instance_num}"
        )
    if settings.cpu_layout.upper() != "BLOCKFIRST":
        warn_once(f"FLEXKV_CPU_LAYOUT={settings.cpu_layout} is ignored: host blocks are always BLOCKFIRST")
    return settings


def client_id_of(settings: FlexKVSettings, dp_client_id: int, dp_size: int) -> int:
    """Number of a data-parallel group among all instances of the node: instance * dp_size + its rank.

    dp_client_id is the group's rank in its engine, or that number already (RankInfo.dp_client_id), which is
    at least dp_size if there are several instances.  A KVServer and the metrics tell engines apart by it.
    """
    return dp_client_id if dp_client_id >= dp_size else settings.instance_id * dp_size + dp_client_id


def rank_endpoint(settings: FlexKVSettings, gpu_register_port: str, dp_client_id: int) -> str:
    """Unix socket at which the ranks of one data-parallel group of this instance register.

    Both arguments as KVManager and KVTPClient are given them.
    """
    suffix = f"_i{settings.instance_id}" if settings.instance_id else ""
    return register_endpoint(f"{gpu_register_port}{suffix}", dp_client_id)


def _read_yaml(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"FLEXKV_CONFIG_PATH: cannot read {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"FLEXKV_CONFIG_PATH: {path} must hold `key: value` lines")
    known = {}
    for key, value in loaded.items():
        if key in FlexKVSettings.model_fields:
            known[key] = value
        elif key in _NOT_APPLICABLE:
            warn_once(f"{path}: {key} has no effect: {_NOT_APPLICABLE[key]}")
        else:
            raise ValueError(f"{path}: unknown key {key!r}{_nearest(str(key))}")
    return known


def _warn_about_environment(environ: Mapping[str, str]) -> None:
    for variable in environ:
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or name in _READ_ELSEWHERE or name in FlexKVSettings.model_fields:
            continue
        if name in _NOT_APPLICABLE:
            warn_once(f"{variable} has no effect: {_NOT_APPLICABLE[name]}")
        else:
            warn_once(f"{variable} is not a known variable{_nearest(name, _PREFIX)}")


def _nearest(name: str, prefix: str = "") -> str:
    matches = difflib.get_close_matches(name, [*FlexKVSettings.model_fields, "config_path"], n=1)
    if not matches:
        return ""
    return f"; did you mean {(prefix + matches[0].upper()) if prefix else matches[0]}?"


@cache
def warn_once(message: str) -> None:
    """Log message as a warning, but only the first time in this process."""
    logger.warning("%s", message)


def settings_table() -> str:
    """The rows of docs/flexkv.md: one for each setting."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in FlexKVSettings.model_fields.items():
        default = "" if field.default == "" else f"`{field.default}`"
        rows.append(f"| `{_PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(settings_table(), end="")  # noqa: T201 - what it is for
