"""What goes wrong around an engine never hangs it, never kills it, and is told."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, RankMemory, small_engine, small_model, tokens_of
from engine_process import EngineProcess
from node import Node
from regions import remove_leftovers, unique_name

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus
from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.settings import warn_once
from radixshmem import Geometry

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES


@pytest.fixture(scope="module", autouse=True)
def early_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, str, float]]:
    """An engine that works while the other tests run, its radix-server's name, and since when."""
    name = unique_name()
    with EngineProcess(name, tmp_path_factory.mktemp("early"), FLEXKV_ATTACH_TIMEOUT_S="600") as engine:
        assert engine.ask("put", PROMPT, HERE) == engine.ask("get", PROMPT, THERE) == 0
        yield engine, name, time.monotonic()
    remove_leftovers(name)


def serves_on(engine: Engine) -> None:
    """Without its cache an engine's calls are misses."""
    for match in (engine.manager.get_match, engine.manager.put_match):
        task_id, mask = match(PROMPT)
        assert not mask.any()
        assert engine.manager.launch([task_id], [engine.slots([])]) == [task_id]
        engine.expect(task_id, KVResponseStatus.SUCCESS)
    task_id = engine.manager.prefetch_async(PROMPT)
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    engine.manager.cancel([task_id])
    engine.manager.reset()


def cache_off_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "without the KV cache" in record.message]


def test_a_radix_server_that_comes_late(
    shm_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with small_engine(shm_name, tmp_path) as engine:
        eventually(lambda: "waiting for radix-server" in caplog.text, "the reason for waiting")
        assert not engine.manager.is_ready()
        serves_on(engine)
        with Daemon(shm_name, "--data-bytes", str(DATA_BYTES)):
            engine.wait_ready()
            engine.manager.reset("one")
            assert engine.put(PROMPT, HERE) == 5 * BLOCK
            assert engine.get(PROMPT, THERE) == 5 * BLOCK
    assert caplog.text.count("waiting for radix-server") == 1


def test_a_radix_server_that_never_comes(
    shm_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_engine(shm_name, tmp_path, environ={"FLEXKV_ATTACH_TIMEOUT_S": "0.5"}) as engine:
        engine.wait_ready()
        assert shm_name in engine.manager.disabled
        serves_on(engine)
    assert len(cache_off_warnings(caplog)) == 1


def test_shutdown_while_waiting_is_quick(shm_name: str, tmp_path: Path) -> None:
    with small_engine(shm_name, tmp_path) as engine:
        start_s = time.monotonic()
        engine.manager.shutdown()
        assert time.monotonic() - start_s < 5


@pytest.mark.parametrize(
    ("theirs", "cause"),
    [
        (Geometry(32, 2 * SMALL_SLOT_BYTES), "block_size"),
        (Geometry(BLOCK, 2 * SMALL_SLOT_BYTES), "full_slot_bytes"),
        (Geometry(BLOCK, SMALL_SLOT_BYTES, slot_align=4096), "slot_align"),
        (Geometry(BLOCK, SMALL_SLOT_BYTES, slot_align=1024, fingerprint="another model"), "fingerprint"),
    ],
)
def test_a_refusal_turns_the_cache_off_at_once(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: Geometry, cause: str
) -> None:
    name = node.serve(data_bytes=1 << 20)
    node.join(name, theirs)
    with small_engine(name, tmp_path, cache=CacheConfig(BLOCK, model_identity="ours")).wait_ready() as engine:
        assert cause in engine.manager.disabled
        serves_on(engine)
        assert engine.manager._backend.metrics.is_disabled
    [warning] = cache_off_warnings(caplog)
    assert cause in warning


def test_a_budget_too_small_is_a_refusal(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=SMALL_SLOT_BYTES - 1)
    with small_engine(name, tmp_path).wait_ready() as engine:
        assert "--data-bytes" in engine.manager.disabled


def test_a_server_without_slots_is_a_refusal(node: Node, tmp_path: Path) -> None:
    name = node.serve()
    node.join(name, Geometry(BLOCK, SMALL_SLOT_BYTES, slot_align=1024, full_slots=10))
    with small_engine(name, tmp_path).wait_ready() as engine:
        assert engine.manager.disabled
        serves_on(engine)


def test_the_switch_that_turns_the_cache_off(tmp_path: Path) -> None:
    with small_engine("/none", tmp_path, environ={"FLEXKV_ENABLE_RADIXSHMEM": "0"}).wait_ready() as engine:
        assert "FLEXKV_ENABLE_RADIXSHMEM" in engine.manager.disabled
        serves_on(engine)


def test_strict_raises_the_refusal(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=1 << 20)
    node.join(name, Geometry(32, 2 * SMALL_SLOT_BYTES))
    with (
        small_engine(name, tmp_path, environ={"FLEXKV_STRICT": "1"}) as engine,
        pytest.raises(RuntimeError, match="block_size"),
    ):
        engine.wait_ready()


def test_tensors_that_do_not_fill_the_slot_fail_the_start(node: Node, tmp_path: Path) -> None:
    """The worker's own text, at once, and not an endless wait."""
    memory = RankMemory(KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 1, 8, BLOCK, 2, 4), 1)
    name = node.serve(data_bytes=DATA_BYTES)
    with Engine(name, tmp_path, small_model(), CacheConfig(BLOCK), [[memory]]) as engine:
        with pytest.raises(RuntimeError, match="slot bytes"):
            engine.wait_ready()
        serves_on(engine)


def test_two_engines_on_one_register_endpoint(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as first:
        with small_engine(name, tmp_path, register=False) as second:
            with pytest.raises(RuntimeError, match="flexkv_gpu_register_0"):
                second.wait_ready()
        assert first.put(PROMPT, HERE) == 5 * BLOCK


def test_cpu_cache_gb_is_warned_about_once(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    name = node.serve(data_bytes=DATA_BYTES)
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        cache = CacheConfig(BLOCK, cpu_cache_gb=16)
        with small_engine(name, tmp_path / directory, cache=cache).wait_ready():
            assert cache.num_cpu_blocks == 64
    assert caplog.text.count("cpu_cache_gb has no effect") == 1


def test_the_tracing_switch_works(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    environ = {"FLEXKV_ENABLE_TRACE": "1", "FLEXKV_TRACE_FILE_PATH": str(path)}
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path, environ=environ).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        engine.get(PROMPT, THERE)
        task_id, _ = engine.manager.get_match(PROMPT)
        with pytest.raises(ValueError, match="slot_mapping"):
            engine.manager.launch([task_id], [engine.slots([1])])
        engine.manager.cancel([task_id])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    calls = [line["call"] for line in lines]
    put, get = ["put_match", "launch", "wait"], ["get_match", "launch", "wait"]
    assert calls == ["start", *put, *get, "get_match", "launch", "cancel", "shutdown"]
    assert lines[4]["result"][1] == 5
    assert "slot_mapping" in lines[8]["error"]


def test_a_trace_that_cannot_be_written_costs_a_warning(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"FLEXKV_ENABLE_TRACE": "1", "FLEXKV_TRACE_FILE_PATH": str(tmp_path / "no" / "such")}
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path, environ=environ).wait_ready() as engine:
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
    assert caplog.text.count("FLEXKV_TRACE_FILE_PATH") == 1


def test_no_thread_is_left_behind(node: Node, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.put(PROMPT, HERE)
    ours = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("flexkv") and thread not in before
    ]
    assert ours == []


@pytest.mark.slow
def test_a_radix_server_that_comes_up_20_s_after_the_engine(
    early_engine: tuple[EngineProcess, str, float],
) -> None:
    """The last test of this file: the engine has been waiting while the others ran."""
    engine, name, since_s = early_engine
    eventually(lambda: time.monotonic() - since_s > 20, "the 20 s")
    assert engine.ask("put", PROMPT, HERE) == engine.ask("get", PROMPT, THERE) == 0
    assert engine.ask("disabled") == ""
    with Daemon(name, "--data-bytes", str(DATA_BYTES)):
        assert engine.ask("ready") == 64
        assert engine.ask("put", PROMPT, HERE) == 5 * BLOCK
        assert engine.ask("get", PROMPT, THERE) == 5 * BLOCK
