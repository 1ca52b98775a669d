"""flexkv_py_* as Prometheus sees them."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from daemon import free_port
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from node import Node

from flexkv_radix.start import metrics_endpoint

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


@pytest.fixture
def port():
    number = free_port()
    yield number
    metrics_endpoint(number).close()
    metrics_endpoint.cache_clear()


def test_everything_is_counted(node: Node, tmp_path: Path, port: int) -> None:
    environ = {"FLEXKV_ENABLE_METRICS": "1", "FLEXKV_METRICS_PORT": str(port)}
    name = node.serve(data_bytes=8 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ, dp_client_id=3).wait_ready() as engine:
        before = scrape(port)
        at = 'dp_client_id="3"'
        for metric in (
            "cache_hit_blocks",
            "cache_miss_blocks",
            "cache_evicted_blocks",
            "cache_no_space_blocks",
        ):
            assert before[f"flexkv_py_{metric}_total{{{at}}}"] == 0
        engine.put(PROMPT, HERE)
        engine.get(PROMPT, THERE)
        engine.manager.get_match(tokens_of(3 * BLOCK, 1))
        engine.put(tokens_of(5 * BLOCK, 2), HERE)
        after = scrape(port)
        assert after[f"flexkv_py_cache_hit_blocks_total{{{at}}}"] == 5
        assert after[f"flexkv_py_cache_miss_blocks_total{{{at}}}"] == 3
        assert after[f"flexkv_py_cache_allocated_blocks_total{{{at}}}"] == 10
        assert after[f"flexkv_py_cache_evicted_blocks_total{{{at}}}"] == 2
        for direction, blocks in (("h2d", 5), ("d2h", 10)):
            labels = f'component="full",direction="{direction}",{at}'
            found = {
                key: value for key, value in after.items() if f'direction="{direction}"' in key and at in key
            }
            assert blocks in [
                v for k, v in found.items() if k.startswith("flexkv_py_transfer_blocks_total")
            ], labels
            sizes = [v for k, v in found.items() if k.startswith("flexkv_py_transfer_bytes_total")]
            assert blocks * SMALL_SLOT_BYTES in sizes
            for span in ("wait", "xfer", "e2e"):
                counts = [
                    v
                    for k, v in found.items()
                    if k.startswith(f"flexkv_py_transfer_{span}_duration_seconds_count")
                ]
                assert counts == [blocks // 5]
        pools = {key: value for key, value in after.items() if key.startswith("flexkv_py_mempool")}
        assert sorted(pools.values()) == [0, 8]
        assert after[f"flexkv_py_cache_disabled{{{at}}}"] == 0
    assert not any(key.startswith("flexkv_py") for key in scrape(port))


def test_a_taken_port_costs_a_warning(
    node: Node, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        environ = {"FLEXKV_ENABLE_METRICS": "1", "FLEXKV_METRICS_PORT": str(port)}
        with small_engine(
            node.serve(data_bytes=8 * SMALL_SLOT_BYTES), tmp_path, environ=environ
        ).wait_ready() as one:
            assert one.put(PROMPT, HERE) == 5 * BLOCK
    assert caplog.text.count("FLEXKV_METRICS_PORT") == 1
