"""ServerConfig: everything that can be set on a radix-server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixshmem import names
from radixshmem.settings import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OCTAL,
    SIZE,
    TEXT,
    Setting,
    parse_environment,
    setting,
    settings_of,
)

EVICT_POLICIES = ("lru", "lfu", "slru", "fifo")  # in the order of RS_LRU, RS_LFU, RS_SLRU, RS_FIFO
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_METRICS_ADDRESS = "127.0.0.1:9464"
MAX_CLIENTS = 1024  # RS_MAX_CLIENTS
MAX_PORT = 65535
_NO_ADDRESS = ("", "off")

_cache = partial(setting, group="Cache")
_region = partial(setting, group="Shared memory")
_process = partial(setting, group="Process")
_cluster = partial(setting, group="Cluster")


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a radix-server.  Every field is a flag, a ``RADIX_*`` variable and a docs row.

    Construction checks every value by itself and against the others; ValueError and TypeError name
    the flag.  What depends on the machine (free memory, names in use) is checked when a server starts.
    """

    name: str = _cache(
        "/flexkv",
        TEXT,
        "Name that clients find this server by; also names its objects in /dev/shm.",
    )
    data_bytes: int = _cache(
        0,
        SIZE,
        "Budget for KV bytes: 64G and 64GiB are 64*2^30, 64GB is 64*10^9. 0: keep an index only, "
        "with counts from the first client's geometry.",
        minimum=0,
        shown_default="index only",
    )
    swa_ratio: float = _cache(
        0.0,
        NUMBER,
        "Part of --data-bytes for sliding-window slots, from 0 to below 1.",
        minimum=0,
        maximum=1,
    )
    mamba_ratio: float = _cache(
        0.0,
        NUMBER,
        "Part of --data-bytes for Mamba state slots, from 0 to below 1.",
        minimum=0,
        maximum=1,
    )
    slot_align: int = _cache(
        4096,
        INTEGER,
        "A slot's stride is its bytes rounded up to this power of two, unless the geometry says otherwise.",
        minimum=1,
        maximum=1 << 30,
    )
    evict_policy: str = _cache(
        "lru",
        TEXT,
        "Which unpinned blocks go first.",
        choices=EVICT_POLICIES,
    )
    background_evict_ratio: float = _cache(
        0.0,
        NUMBER,
        "Keep this part of every pool free by evicting in the background. 0: evict on demand only, "
        "which costs the same per block.",
        minimum=0,
        maximum=0.9,
    )
    kvevent_ring_capacity: int = _cache(
        65536,
        INTEGER,
        "Events (stored and removed blocks) kept for readers, rounded up to a power of two. 0: none.",
        minimum=0,
        maximum=1 << 28,
    )
    max_clients: int = _cache(
        256,
        INTEGER,
        "Clients that may be attached at once, the server's own included.",
        minimum=2,
        maximum=MAX_CLIENTS,
    )
    pins_per_client: int = _cache(
        1024,
        INTEGER,
        "Pins that one client may hold at once.",
        minimum=1,
        maximum=1 << 20,
    )
    register_chunk_tokens: int = _cache(
        4096,
        INTEGER,
        "Granularity of cluster routing, unless the geometry says otherwise.",
        minimum=1,
        maximum=1 << 30,
    )
    require_fingerprint: bool = _cache(
        False,
        BOOLEAN,
        "Refuse clients whose geometry has no fingerprint.",
    )
    reap_quarantine_s: float = _cache(
        2.0,
        NUMBER,
        "How long the staged slots of a dead client whose slots a device may still write are held back.",
        minimum=0,
        maximum=3600,
    )

    data_name: str = _region(
        "",
        TEXT,
        "Name of the SlotStore object.",
        shown_default="<name>_data",
    )
    endpoint: str = _region(
        "",
        TEXT,
        "Control socket, as unix:///path.",
        shown_default="unix:///dev/shm/<name>.sock",
    )
    hugepage_path: str = _region(
        "",
        TEXT,
        "Mounted hugetlbfs directory to keep the SlotStore in.",
        shown_default="normal pages in /dev/shm",
    )
    hugepage_fallback: bool = _region(
        False,
        BOOLEAN,
        "Use normal pages when --hugepage-path has too few free huge pages, instead of failing.",
    )
    prefault: bool = _region(
        True,
        BOOLEAN,
        "Touch every page before the server is ready. Space is reserved either way.",
    )
    prefault_threads: int = _region(
        0,
        INTEGER,
        "Threads that prefault.",
        minimum=0,
        maximum=1024,
        shown_default="one per CPU, at most 16",
    )
    numa: str = _region(
        "",
        TEXT,
        "NUMA nodes to place the regions on: 'interleave' over all, or node numbers such as 0 or 0,1.",
        shown_default="the kernel's default",
    )
    mode: int = _region(
        0o600,
        OCTAL,
        "Permissions of regions and socket: 0600, 0660 or 0666.",
        shown_default="0600",
    )
    group: str = _region(
        "",
        TEXT,
        "Group (name or number) that owns regions and socket; wants --mode 0660.",
        shown_default="the process's",
    )
    fresh: bool = _region(
        False,
        BOOLEAN,
        "Discard what an earlier server of this name left, instead of adopting it.",
    )
    keep: bool = _region(
        False,
        BOOLEAN,
        "Leave the regions in place on a clean stop, for the next server to adopt.",
    )

    rpc_workers: int = _process(
        8,
        INTEGER,
        "Threads that answer control requests.",
        minimum=2,
        maximum=256,
    )
    metrics_address: str | None = _process(
        None,
        TEXT,
        "host:port of the HTTP endpoint for /metrics, /healthz and /readyz; '' or off: none. Only the "
        "default address may be taken by another server.",
        shown_default=DEFAULT_METRICS_ADDRESS,
    )
    log_format: str = _process(
        "text",
        TEXT,
        "Lines for people or one JSON object per line.",
        choices=("text", "json"),
    )
    log_file: str = _process(
        "",
        TEXT,
        "File to append log lines to; SIGHUP opens it anew. Without one SIGHUP switches to debug and back.",
        shown_default="standard error",
    )
    log_level: str = _process(
        "info",
        TEXT,
        "Least severe messages to log.",
        choices=LOG_LEVELS,
    )

    expected_min_nodes: int = _cluster(
        1,
        INTEGER,
        "Nodes to wait for before the cluster forms.",
        minimum=1,
        maximum=4096,
    )
    registry: str = _cluster(
        "",
        TEXT,
        "Where the nodes find each other: etcd://host:port[,host:port].",
        shown_default="one node",
    )
    cluster_id: str = _cluster(
        "default",
        TEXT,
        "Nodes with the same id form one cluster.",
    )
    node_name: str = _cluster(
        "",
        TEXT,
        "This node's name in the cluster.",
        shown_default="the host name",
    )
    rpc_address: str = _cluster(
        "",
        TEXT,
        "Address that peers reach this server at.",
        shown_default="of --rpc-interface",
    )
    rpc_interface: str = _cluster(
        "",
        TEXT,
        "Network interface whose address peers use.",
        shown_default="of the default route",
    )
    rpc_port: int = _cluster(
        0,
        INTEGER,
        "Port for peers' requests.",
        minimum=0,
        maximum=MAX_PORT,
        shown_default="any free port",
    )
    bootstrap_timeout_s: float = _cluster(
        600.0,
        NUMBER,
        "Seconds to wait for --expected-min-nodes.",
        flag="--bootstrap-timeout",
        minimum=0,
        maximum=86400,
    )
    settle_ms: int = _cluster(
        1000,
        INTEGER,
        "Quiet time after the last node came before ranks are given.",
        minimum=0,
        maximum=600_000,
    )
    num_rht_shards: int = _cluster(
        16,
        INTEGER,
        "Shards of the routing hash table.",
        minimum=1,
        maximum=4096,
    )
    transfer_protocol: str = _cluster(
        "tcp",
        TEXT,
        "How blocks travel between nodes.",
        choices=("rdma", "tcp"),
    )
    transfer_dev: str = _cluster(
        "",
        TEXT,
        "RDMA devices, separated by commas.",
        shown_default="all",
    )
    transfer_ip: str = _cluster(
        "",
        TEXT,
        "Address that blocks travel over.",
        shown_default="--rpc-address",
    )
    transfer_port: int = _cluster(
        0,
        INTEGER,
        "Port that blocks travel over.",
        minimum=0,
        maximum=MAX_PORT,
        shown_default="any free port",
    )
    max_inflight: int = _cluster(
        64,
        INTEGER,
        "Block transfers under way at once.",
        minimum=1,
        maximum=65536,
    )
    max_pending_jobs: int = _cluster(
        1024,
        INTEGER,
        "Pull jobs that may wait.",
        minimum=1,
        maximum=1 << 20,
    )
    job_ttl_s: float = _cluster(
        60.0,
        NUMBER,
        "Seconds that a finished pull job waits to be collected.",
        flag="--job-ttl",
        minimum=0,
        maximum=86400,
    )
    tls_cert: str = _cluster("", TEXT, "Certificate (PEM file) shown to peers.", shown_default="no TLS")
    tls_key: str = _cluster(
        "",
        TEXT,
        "Key (PEM file) of --tls-cert.",
    )
    tls_ca: str = _cluster(
        "",
        TEXT,
        "Authority (PEM file) that peers' certificates must come from.",
    )

    def __post_init__(self) -> None:
        for s in SETTINGS if type(self) is ServerConfig else settings_of(type(self)):
            s.check(getattr(self, s.field))
        _check_names(self)
        _check_cache(self)
        _check_access(self)
        _check_cluster(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **fields: Any) -> ServerConfig:
        """Configuration from ``RADIX_*`` variables; ``fields`` win over them."""
        return cls(**{**parse_environment(SETTINGS, environ), **fields})

    @property
    def resolved_data_name(self) -> str:
        """Name of the SlotStore object; "" for an index-only server."""
        return (self.data_name or names.default_data_name(self.name)) if self.data_bytes else ""

    @property
    def resolved_endpoint(self) -> str:
        """gRPC target of the control socket."""
        return self.endpoint or names.default_endpoint(self.name)

    @property
    def resolved_metrics_address(self) -> tuple[str, int] | None:
        """Host and port of the HTTP endpoint; None without one."""
        address = DEFAULT_METRICS_ADDRESS if self.metrics_address is None else self.metrics_address
        return None if address in _NO_ADDRESS else split_address(address, "--metrics-address")

    @property
    def is_cluster(self) -> bool:
        return bool(self.registry) or self.expected_min_nodes > 1


SETTINGS: list[Setting] = settings_of(ServerConfig)


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; ValueError naming ``flag``."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ValueError(f"{flag}: {address!r} is not host:port")
    return host, int(port)


def _check_names(config: ServerConfig) -> None:
    names.check_name(config.name, "--name")
    if config.data_name:
        names.check_object_name(config.data_name, "--data-name")
        if config.data_name == config.name or config.data_name.endswith((".sock", ".lock")):
            raise ValueError(
                f"--data-name: {config.data_name!r} is the name of another object of a server: choose one "
                f"that is not --name and does not end in .sock or .lock"
            )
    if config.endpoint:
        names.socket_path(config.endpoint, "--endpoint")
    if config.hugepage_path and not os.path.isabs(config.hugepage_path):
        raise ValueError(f"--hugepage-path: {config.hugepage_path!r} is not an absolute path")
    if config.log_file and not os.path.isabs(config.log_file):
        raise ValueError(f"--log-file: {config.log_file!r} is not an absolute path")
    if config.metrics_address not in (None, *_NO_ADDRESS):
        split_address(config.metrics_address, "--metrics-address")


def _check_cache(config: ServerConfig) -> None:
    if config.swa_ratio + config.mamba_ratio >= 1:
        raise ValueError(
            f"--swa-ratio {config.swa_ratio:g} and --mamba-ratio {config.mamba_ratio:g} leave nothing of "
            "--data-bytes for full attention: together they must stay below 1"
        )
    if not config.data_bytes and (config.swa_ratio or config.mamba_ratio):
        flag = "--swa-ratio" if config.swa_ratio else "--mamba-ratio"
        raise ValueError(f"{flag} is a part of --data-bytes: give --data-bytes too")
    if config.slot_align & (config.slot_align - 1):
        raise ValueError(f"--slot-align: {config.slot_align} is not a power of two")
    parts = config.numa.split(",") if config.numa not in ("", "interleave") else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"--numa: {config.numa!r} is neither 'interleave' nor node numbers such as 0,1")


def _check_access(config: ServerConfig) -> None:
    if config.mode & ~0o666 or config.mode & 0o600 != 0o600:
        raise ValueError(f"--mode: {config.mode:04o} must give the owner rw, nobody x, and no other bits")


def _check_cluster(config: ServerConfig) -> None:
    if config.registry:
        scheme, _, hosts = config.registry.partition("://")
        if scheme != "etcd":
            raise ValueError(f"--registry: {config.registry!r} is not etcd://host:port[,host:port]")
        for address in hosts.split(","):
            split_address(address, "--registry")
    given = [flag for flag in ("tls_cert", "tls_key", "tls_ca") if getattr(config, flag)]
    if given and len(given) < 3:
        raise ValueError("--tls-cert, --tls-key and --tls-ca go together: give all three or none")
