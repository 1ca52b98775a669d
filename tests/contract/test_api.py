"""The names, signatures and types that callers rely on.  A change here is a change of the public API."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radixshmem
from radixshmem import (
    ComponentType,
    EventKind,
    EventReason,
    Geometry,
    InsertError,
    InsertResult,
    Pool,
    PullJob,
    PullResult,
    QueryResult,
    QueryStatus,
    RadixClient,
    RadixServer,
    ServerConfig,
    ServerInfo,
    SlotStore,
    hash_blocks,
)

NAMES = {
    "COMPONENT_MASK_FULL",
    "COMPONENT_MASK_MAMBA",
    "COMPONENT_MASK_SWA",
    "ClientClosed",
    "ComponentType",
    "CorruptRegion",
    "Event",
    "EventKind",
    "EventReason",
    "Geometry",
    "GeometryMismatch",
    "IndexBusy",
    "InsertError",
    "InsertResult",
    "NoSpace",
    "Pool",
    "PullJob",
    "PullResult",
    "QueryResult",
    "QueryStatus",
    "RadixClient",
    "RadixError",
    "RadixServer",
    "RegionRetired",
    "ServerConfig",
    "ServerInfo",
    "ServerNotReady",
    "ServerUnavailable",
    "SlotStore",
    "__version__",
    "hash_blocks",
}


def test_exported_names() -> None:
    assert set(radixshmem.__all__) == NAMES
    assert all(hasattr(radixshmem, name) for name in NAMES)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = radixshmem.nothing_like_it


def test_enumerations() -> None:
    assert {c.name: c.value for c in ComponentType} == {"FULL": 0, "SWA": 1, "MAMBA": 2}
    assert [e.name for e in InsertError] == [
        "OK",
        "FULL_PATH_MISSING",
        "PREFIX_MISSING",
        "STALE_GENERATION",
        "BUSY",
    ]
    assert list(InsertError) == [0, 1, 2, 3, 4]
    assert {s.name: s.value for s in QueryStatus} == {"OK": 0, "BUSY": 1, "PIN_LIMIT": 2}
    assert {k.name: k.value for k in EventKind} == {"STORED": 1, "REMOVED": 2, "CLEARED": 3}
    assert [r.name for r in EventReason] == ["NONE", "CAPACITY", "BACKGROUND", "REQUEST", "RESET"]
    masks = (radixshmem.COMPONENT_MASK_FULL, radixshmem.COMPONENT_MASK_SWA, radixshmem.COMPONENT_MASK_MAMBA)
    assert masks == (1, 2, 4)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("RadixError", RuntimeError),
        ("ServerUnavailable", radixshmem.RadixError),
        ("ServerNotReady", radixshmem.RadixError),
        ("GeometryMismatch", ValueError),
        ("CorruptRegion", radixshmem.RadixError),
        ("RegionRetired", radixshmem.RadixError),
        ("ClientClosed", radixshmem.RadixError),
        ("IndexBusy", radixshmem.RadixError),
        ("NoSpace", radixshmem.RadixError),
    ],
)
def test_errors(name: str, base: type[Exception]) -> None:
    assert getattr(radixshmem, name).__bases__ == (base,)


def test_unavailable_text_has_its_prefix_once() -> None:
    for text in ("nobody", "UNAVAILABLE: nobody"):
        assert str(radixshmem.ServerUnavailable(text)) == "UNAVAILABLE: nobody"


SIGNATURES: dict[Callable[..., Any], str] = {
    RadixClient.__init__: (
        "(name, geometry=None, *, endpoint=None, max_outstanding=256, timeout_s=10.0, label='')"
    ),
    RadixClient.wait_ready: "(timeout_s=600.0)",
    RadixClient.status: "()",
    RadixClient.reattach: "()",
    RadixClient.rank: "()",
    RadixClient.world_size: "()",
    RadixClient.is_distributed: "()",
    RadixClient.block_size: "()",
    RadixClient.close: "()",
    RadixClient.query: "(hashes, *, mask=1, local_only=True, lock=False, update_meta=True)",
    RadixClient.allocate_slots: "(n, *, component=<ComponentType.FULL: 0>)",
    RadixClient.insert: "(hashes, slots, *, start=0, auto_recycle=True, component=<ComponentType.FULL: 0>)",
    RadixClient.recycle_slots: "(slots, *, component=<ComponentType.FULL: 0>)",
    RadixClient.reset: "()",
    RadixClient.flush: "()",
    RadixClient.mempool_total: "()",
    RadixClient.mempool_free: "()",
    RadixClient.swa_mempool_total: "()",
    RadixClient.swa_mempool_free: "()",
    RadixClient.mamba_mempool_total: "()",
    RadixClient.mamba_mempool_free: "()",
    RadixClient.stats: "()",
    RadixClient.kvevent_seek_to_head: "()",
    RadixClient.kvevent_drain: "(max_hashes)",
    RadixClient.events: "(cursor)",
    RadixClient.pull_async: "(hashes, mask=1, *, lock=False, timeout_ms=5000, block=True)",
    RadixClient.slot_view: "(slot, component=<ComponentType.FULL: 0>)",
    PullJob.done: "()",
    PullJob.wait: "(timeout=None)",
    PullJob.cancel: "()",
    SlotStore.attach: "(name, hugepage_path='', timeout_ms=5000)",
    SlotStore.destroy: "(name, hugepage_path='')",
    SlotStore.pool: "(component)",
    SlotStore.array: "(component)",
    SlotStore.data_view: "()",
    RadixServer.start: "()",
    RadixServer.close: "()",
    hash_blocks: "(tokens, block_size, prefix=None)",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    assert str(inspect.Signature(parameters)) == SIGNATURES[function]
    assert signature.return_annotation is not inspect.Signature.empty
    assert function is RadixClient.__init__ or function.__doc__, "every public function has its contract"


def test_pool_tensor_is_all_that_needs_torch() -> None:
    pytest.importorskip("torch")
    from radixshmem.torch import pool_tensor

    assert list(inspect.signature(pool_tensor).parameters) == ["store", "component", "dtype"]


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (RadixClient, ("geometry", "index", "kvevent_enabled", "store")),
        (QueryResult, ("status", "full_hit", "common_hit", "full_fragments", "swa_slots", "swa_start")),
        (QueryResult, ("mamba_slots", "finalize")),
        (RadixServer, ("info",)),
    ],
)
def test_properties(owner: type, names: tuple[str, ...]) -> None:
    for name in names:
        assert isinstance(inspect.getattr_static(owner, name), property), name
        assert inspect.getattr_static(owner, name).__doc__, name


@pytest.mark.parametrize("owner", [RadixClient, RadixServer, QueryResult])
def test_context_managers(owner: type) -> None:
    assert hasattr(owner, "__enter__")
    assert hasattr(owner, "__exit__")


def test_record_fields() -> None:
    assert InsertResult._fields == ("error", "unused_slots", "num_inserted")
    assert PullResult._fields == ("common_hit", "remote_blocks", "remote_bytes", "source_rank", "finalize")
    assert Pool._fields == ("num_slots", "slot_bytes", "offset")
    event = ("kind", "reason", "hash", "parent_hash", "component", "number", "client", "incarnation")
    assert radixshmem.Event._fields == event
    assert {"job_id", "local_hit", "planned_hit"} <= set(PullJob.__slots__)


def test_geometry_fields() -> None:
    assert [(field.name, field.default) for field in dataclasses.fields(Geometry)] == [
        ("block_size", dataclasses.MISSING),
        ("full_slot_bytes", dataclasses.MISSING),
        ("swa_slot_bytes", 0),
        ("swa_window_blocks", 0),
        ("mamba_slot_bytes", 0),
        ("slot_align", 0),
        ("register_chunk_tokens", 0),
        ("fingerprint", ""),
        ("full_slots", 0),
        ("swa_slots", 0),
        ("mamba_slots", 0),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Geometry(16, 4096).block_size = 32  # type: ignore[misc]


def test_server_records_have_the_fields_that_callers_read() -> None:
    info = {field.name for field in dataclasses.fields(ServerInfo)}
    assert info >= {
        "name", "index_name", "data_name", "endpoint", "mode", "last_error", "rank", "world_size",
        "data_plane", "geometry", "hugepage_path", "pid", "epoch", "version",
    }  # fmt: skip
    config = {field.name for field in dataclasses.fields(ServerConfig)}
    assert config >= {
        "name", "data_bytes", "swa_ratio", "mamba_ratio", "slot_align", "prefault", "data_name", "endpoint",
        "hugepage_path", "register_chunk_tokens", "background_evict_ratio", "evict_policy",
        "kvevent_ring_capacity", "max_clients", "rpc_workers",
    }  # fmt: skip
    resolved = ServerConfig(name="/x", data_bytes=1 << 20)
    assert resolved.resolved_data_name == "/x_data"
    assert resolved.resolved_endpoint == "unix:///dev/shm/x.sock"


def test_the_package_is_typed() -> None:
    assert Path(radixshmem.__file__).with_name("py.typed").exists()


def test_a_client_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import radixshmem, sys; bad = {'torch', 'radixshmem.server', 'flexkv_radix', 'prometheus_client'}"
        "; sys.exit(str(sorted(bad & set(sys.modules))) if bad & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
