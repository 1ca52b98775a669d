"""Finding a radix-server, agreeing with it, and taking over what it says."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, small_model, tokens_of
from kv_server import children_of
from node import Node

from flexkv_radix import (
    CacheConfig,
    SWAPoolConfig,
    adopt_radix_server,
    attach_radix_client,
    check_geometry,
    expected_geometry,
    radix_server_is_distributed,
)
from flexkv_radix.attach import AttachCancelled
from radixshmem import Geometry, GeometryMismatch

GEOMETRY = expected_geometry(small_model(), CacheConfig(BLOCK))
PUBLISHED = {
    "block_size": BLOCK,
    "slot_align": GEOMETRY.slot_align,
    "pools": {
        "full": {"slot_bytes": SMALL_SLOT_BYTES, "num_slots": 7},
        "swa": {"slot_bytes": 512, "window_blocks": 2, "num_slots": 5},
    },
}


def test_attach_to_a_server_that_is_there(node: Node) -> None:
    name = node.serve(data_bytes=7 * SMALL_SLOT_BYTES)
    with attach_radix_client(name, GEOMETRY, 20) as client:
        assert client.allocate_slots(7).size == 7
        assert not radix_server_is_distributed(client)
    with pytest.raises(GeometryMismatch, match="block_size"):
        attach_radix_client(name, Geometry(2 * BLOCK, SMALL_SLOT_BYTES, slot_align=1024), 600)


def test_a_server_that_never_comes(shm_name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(TimeoutError, match=f"{shm_name} was not ready within 1.2 s"):
        attach_radix_client(shm_name, GEOMETRY, 1.2)
    assert caplog.text.count(f"radix-server --name {shm_name}") == 1, "said at every try"


def test_who_waits_says_so_every_half_minute(
    shm_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a clock that is forty times as fast."""
    fast = SimpleNamespace(monotonic=lambda: 40 * time.monotonic())
    monkeypatch.setattr("flexkv_radix.attach.time", fast)
    caplog.set_level(logging.INFO)
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        attached = pool.submit(attach_radix_client, shm_name, GEOMETRY, 1e6, stop)
        eventually(lambda: len(caplog.records) >= 3, "the second reminder")
        stop.set()
        with pytest.raises(AttachCancelled):
            attached.result(20)
    gaps_s = [40 * (later.created - sooner.created) for sooner, later in pairwise(caplog.records)]
    assert min(gaps_s) > 29, gaps_s  # a line is timed a little after it was due


@pytest.mark.parametrize(
    ("pool", "field", "name"),
    [
        ("", "block_size", "block_size"),
        ("", "slot_align", "slot_align"),
        ("full", "slot_bytes", "full.slot_bytes"),
        ("swa", "slot_bytes", "swa.slot_bytes"),
        ("swa", "window_blocks", "swa.window_blocks"),
    ],
)
def test_shapes_that_differ_are_refused(pool: str, field: str, name: str) -> None:
    """Both sides are shown.  The counts are the server's, and no reason."""
    expected = Geometry(BLOCK, SMALL_SLOT_BYTES, 512, 2, slot_align=GEOMETRY.slot_align)
    check_geometry(PUBLISHED, expected)
    theirs = {**PUBLISHED, "pools": {key: dict(value) for key, value in PUBLISHED["pools"].items()}}
    at = theirs["pools"][pool] if pool else theirs
    ours, at[field] = at[field], 2 * at[field]
    with pytest.raises(GeometryMismatch, match=f"{name}': {2 * ours}.*{name}': {ours}"):
        check_geometry(theirs, expected)


def test_nothing_published_and_no_window_are_refused() -> None:
    with pytest.raises(GeometryMismatch, match="no geometry"):
        check_geometry(None, GEOMETRY)
    with pytest.raises(GeometryMismatch, match="swa"):
        check_geometry(PUBLISHED, GEOMETRY)
    without = {**PUBLISHED, "pools": {"full": PUBLISHED["pools"]["full"]}}
    check_geometry(without, GEOMETRY)
    with pytest.raises(GeometryMismatch, match="swa"):
        check_geometry(without, Geometry(BLOCK, SMALL_SLOT_BYTES, 512, 2, slot_align=GEOMETRY.slot_align))


def wrong_cache_config(*, swa: bool) -> CacheConfig:
    """One that says of the server what cannot be."""
    window = SWAPoolConfig(BLOCK, num_layers=1, num_kv_heads=2, head_size=4, dtype="int16") if swa else None
    cache = CacheConfig(BLOCK, swa=window)
    cache.num_cpu_blocks, cache.node_rank, cache.num_nodes, cache.enable_kv_sharing = 99, 7, 9, True
    return cache


def assert_adopted(cache: CacheConfig) -> None:
    assert cache.num_cpu_blocks not in (0, 99)
    assert (cache.node_rank, cache.num_nodes, cache.enable_kv_sharing) == (0, 1, False)


def test_counts_and_place_are_the_servers(node: Node) -> None:
    cache = wrong_cache_config(swa=True)
    name = node.serve(data_bytes=64 << 10, swa_ratio=0.5)
    with attach_radix_client(name, expected_geometry(small_model(), cache), 20) as client:
        adopt_radix_server(client, cache)
        assert_adopted(cache)
        assert cache.num_cpu_blocks == client.mempool_total()
        assert cache.swa is not None
        assert cache.swa.num_slots == client.swa_mempool_total()


@pytest.mark.parametrize("environ", [{}, {"FLEXKV_SERVER_CLIENT_MODE": "1"}], ids=["in process", "KVServer"])
def test_an_engine_takes_them_over_and_runs_where_it_should(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes], environ: dict[str, str]
) -> None:
    cache = wrong_cache_config(swa=False)
    name = node.serve(data_bytes=7 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, cache=cache, environ=environ).wait_ready() as engine:
        engine.manager.get_match(tokens_of(BLOCK))
        assert_adopted(cache)
        assert cache.num_cpu_blocks == 7
        workers = len(children_of(os.getpid()) - {server.pid}), len(children_of(server.pid))
        assert workers == ((0, 1) if environ else (1, 0))


def test_the_number_of_copy_threads(node: Node, tmp_path: Path) -> None:
    def num_threads(copy_threads: int) -> int:
        directory = tmp_path / str(copy_threads)
        directory.mkdir()
        environ = {"FLEXKV_COPY_THREADS": str(copy_threads)}
        with small_engine(name, directory, environ=environ).wait_ready() as engine:
            assert engine.put(tokens_of(BLOCK, copy_threads), [1]) == BLOCK
            return len(os.listdir(f"/proc/{engine.manager._backend._driver.worker.pid}/task"))

    name = node.serve(data_bytes=7 * SMALL_SLOT_BYTES)
    assert num_threads(6) - num_threads(2) == 2 * 4  # a crew for each direction
