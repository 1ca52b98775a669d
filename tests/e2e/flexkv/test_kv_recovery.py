"""What dies under an engine costs it the transfers under way, and then the cache comes back by itself."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, eventually
from engine import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERFIRST,
    SMALL_SLOT_BYTES,
    Engine,
    RankMemory,
    small_engine,
    small_model,
    tokens_of,
)  # fmt: skip
from engine_process import EngineProcess
from node import Node

from flexkv_radix import (
    AllBlocksCleared,
    BlockStored,
    CacheConfig,
    KVCacheLayout,
    KVResponseStatus,
    ModelConfig,
)  # fmt: skip
from flexkv_radix.restarts import Restarts
from radixshmem import RadixClient

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES
FLAGS = ("--data-bytes", str(DATA_BYTES))


def worker_of(engine: Engine) -> int:
    return int(engine.manager._backend._driver.worker.pid)


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if text in record.message]


def nothing_held(client: RadixClient) -> Any:
    full = client.stats()["pool"]["full"]
    return full if (full["num_pins"], full["num_staged"]) == (0, 0) else None


def is_back(engine: Engine) -> None:
    eventually(lambda: not engine.manager.disabled, lambda: f"the cache: {engine.manager.disabled}")


def finds_nothing(engine: Engine) -> None:
    """Without its cache an engine's calls are misses."""
    for match in (engine.manager.get_match, engine.manager.put_match):
        task_id, mask = match(PROMPT)
        assert not mask.any()
        engine.expect(task_id, KVResponseStatus.SUCCESS)


def test_a_killed_transfer_worker(node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        client = node.join(name)
        first = worker_of(engine)
        os.kill(first, signal.SIGSTOP)  # so that what is launched now is still running
        engine.compute(tokens_of(4 * BLOCK, 1), HERE)
        put, _ = engine.manager.put_match(tokens_of(4 * BLOCK, 1))
        get, _ = engine.manager.get_match(PROMPT)
        unlaunched, _ = engine.manager.get_match(PROMPT)
        engine.manager.launch([put, get], [engine.slots(HERE[:4]), engine.slots(THERE)])
        start_s = time.monotonic()
        os.kill(first, signal.SIGKILL)
        responses = engine.manager.wait([put, get], timeout=20)
        assert time.monotonic() - start_s < 5
        assert {response.status for response in responses.values()} == {KVResponseStatus.FAILED}
        assert all("worker" in response.error for response in responses.values())
        assert "worker" in engine.expect(unlaunched, KVResponseStatus.FAILED).error
        assert engine.manager.is_ready()
        full = eventually(lambda: nothing_held(client), "pins and staged slots", timeout_s=5)
        assert full["num_published"] == 5
        is_back(engine)
        assert worker_of(engine) != first
        assert engine.get(PROMPT, THERE) == 5 * BLOCK
        assert engine.put(tokens_of(4 * BLOCK, 1), HERE) == 4 * BLOCK
        assert engine.get(tokens_of(4 * BLOCK, 1), THERE) == 4 * BLOCK
        assert not engine.manager._backend.metrics.is_disabled
        assert len(warnings_of(caplog, "without the KV cache")) == 1
        assert len(warnings_of(caplog, "the KV cache is back")) == 1


def test_a_worker_that_dies_again_and_again_is_left_alone(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        driver = engine.manager._backend._driver
        driver._restarts = Restarts(max_deaths=3)
        for death in range(3):
            assert engine.put(tokens_of(5 * BLOCK, death), HERE) == 5 * BLOCK
            first = driver.worker
            os.kill(first.pid, signal.SIGKILL)
            eventually(lambda first=first: driver.worker is not first, "the loss of the worker")
            if death < 2:
                is_back(engine)
        finds_nothing(engine)
        assert "3 deaths within 300 s, it is not started again" in engine.manager.disabled
        assert engine.manager.is_ready()
        assert engine.manager._backend.metrics.is_disabled
    assert len(warnings_of(caplog, "not started again")) == 1


def test_no_wrong_byte_while_workers_are_killed(node: Node, tmp_path: Path) -> None:
    """Stores, loads and deaths at random moments; what is loaded with success is what was stored."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.manager._backend._driver._restarts = Restarts(max_deaths=100, window_s=0.5)
        rng = np.random.default_rng(11)
        for _ in range(4):
            killer = threading.Timer(rng.uniform(0.0, 0.1), os.kill, (worker_of(engine), signal.SIGKILL))
            driver = engine.manager._backend._driver
            first = driver.worker
            killer.start()
            prompts = itertools.cycle(tokens_of(5 * BLOCK, name) for name in range(15))
            while driver.worker is first:
                _store_and_load(engine, next(prompts))
            killer.join()
            num_loaded, end_s = 0, time.monotonic() + 60
            while num_loaded < 20:
                num_loaded += _store_and_load(engine, next(prompts))
                assert time.monotonic() < end_s, engine.manager.disabled
        client = node.join(name)
        eventually(lambda: nothing_held(client), "pins and staged slots")


def _store_and_load(engine: Engine, tokens: Any) -> bool:
    """Whether a load moved something; checks its bytes."""
    engine.compute(tokens, HERE)
    put, mask = engine.manager.put_match(tokens)
    if mask.any():
        engine.manager.launch([put], [engine.slots(engine.moved(mask, HERE))])
    engine.manager.wait([put], 20)
    get, mask = engine.manager.get_match(tokens)
    moved = engine.moved(mask, THERE)
    if not moved:
        return False
    engine.manager.launch([get], [engine.slots(moved)])
    if engine.manager.wait([get], 20)[get].status is not KVResponseStatus.SUCCESS:
        return False
    assert engine.wrong_blocks(tokens, moved) == []
    return True


def test_a_batch_with_a_lost_task_fails_as_a_whole(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        lost, _ = engine.manager.get_match(PROMPT)
        os.kill(worker_of(engine), signal.SIGKILL)
        eventually(lambda: engine.manager.disabled, "the loss of the worker")
        is_back(engine)
        good, mask = engine.manager.get_match(PROMPT)
        assert mask.all()
        slots = [engine.slots(THERE), engine.slots([40, 41, 42, 43, 44])]
        [batch] = engine.manager.launch([lost, good], slots, as_batch=True)
        response = engine.expect(batch, KVResponseStatus.FAILED)
        assert "worker" in response.error
        assert not any(mask.any() for mask in response.return_mask)
        eventually(lambda: nothing_held(node.join(name)), "the good one's pin")


def test_a_server_stopped_for_good_and_another(
    shm_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_engine(shm_name, tmp_path) as engine:
        with Daemon(shm_name, *FLAGS) as server:
            engine.wait_ready()
            engine.put(PROMPT, HERE)
            pinned, _ = engine.manager.get_match(PROMPT)
            staged, _ = engine.manager.put_match(tokens_of(BLOCK, 1))
            engine.compute(tokens_of(BLOCK, 1), [7])
            assert server.stop() == 0
        engine.manager.launch([staged], [engine.slots([7])])  # noticed or not: it cannot be published
        assert "retired" in engine.expect(staged, KVResponseStatus.FAILED).error
        eventually(lambda: "retired" in engine.manager.disabled, "the end of the server")
        response = eventually(lambda: engine.manager.try_wait([pinned]), "the end of the unlaunched load")[
            pinned
        ]
        assert response.status is KVResponseStatus.FAILED
        assert "retired" in response.error
        finds_nothing(engine)
        with Daemon(shm_name, "--data-bytes", str(2 * DATA_BYTES)):
            is_back(engine)
            assert engine.get(PROMPT, THERE) == 0
            for turn in range(25):  # 125 blocks, of which the old server would have held 64
                assert engine.put(tokens_of(5 * BLOCK, turn), HERE) == 5 * BLOCK
            for turn in range(25):
                assert engine.get(tokens_of(5 * BLOCK, turn), THERE) == 5 * BLOCK
    assert len(warnings_of(caplog, "without the KV cache")) == 1


def test_a_server_killed_and_made_anew_under_load(shm_name: str, tmp_path: Path) -> None:
    with small_engine(shm_name, tmp_path) as engine:
        with Daemon(shm_name, *FLAGS) as server:
            engine.wait_ready()
            engine.put(PROMPT, HERE)
            epoch, before = server.wait_mode("ready").epoch, engine.manager._backend.tier
            server.kill()
        assert engine.get(PROMPT, THERE) == 5 * BLOCK  # a dead server is not noticed
        with Daemon(shm_name, *FLAGS, "--fresh") as server:
            loaded = [_store_and_load(engine, tokens_of(5 * BLOCK, turn % 15)) for turn in range(60)]
            assert loaded[0], "the old region serves until it is retired"
            eventually(lambda: engine.manager._backend.tier not in (None, before), "the new region")
            assert server.wait_mode("ready").epoch != epoch
            assert engine.get(PROMPT, THERE) == 0
            assert engine.put(tokens_of(5 * BLOCK, 100), HERE) == 5 * BLOCK
            assert engine.get(tokens_of(5 * BLOCK, 100), THERE) == 5 * BLOCK


def test_another_server_that_refuses(shm_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_engine(shm_name, tmp_path) as engine:
        with Daemon(shm_name, *FLAGS) as server:
            engine.wait_ready()
            engine.put(PROMPT, HERE)
            assert server.stop() == 0
        with Daemon(shm_name, "--data-bytes", str(SMALL_SLOT_BYTES - 1)):
            eventually(lambda: "--data-bytes" in engine.manager.disabled, lambda: engine.manager.disabled)
            finds_nothing(engine)
            assert engine.manager.is_ready()
    refusals = [text for text in warnings_of(caplog, "without the KV cache") if "--data-bytes" in text]
    assert len(refusals) == 1


def test_shutdown_while_waiting_for_another_server(shm_name: str, tmp_path: Path) -> None:
    with small_engine(shm_name, tmp_path) as engine:
        with Daemon(shm_name, *FLAGS) as server:
            engine.wait_ready()
            assert server.stop() == 0
        eventually(lambda: engine.manager.disabled, "the end of the server")
        start_s = time.monotonic()
        engine.manager.shutdown()
        assert time.monotonic() - start_s < 5


def test_ranks_in_processes_register_again(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with EngineProcess(name, tmp_path) as engine:
        engine.ask("ready")
        assert engine.ask("put", PROMPT, HERE) == 5 * BLOCK
        for _ in range(2):
            first = engine.ask("worker_pid")
            os.kill(first, signal.SIGKILL)
            eventually(lambda first=first: engine.ask("worker_pid") not in (0, first), "another worker")
            eventually(lambda: engine.ask("disabled") == "", "the cache")
            assert engine.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_tensor_parallel_ranks_register_again(node: Node, tmp_path: Path) -> None:
    memories = [[RankMemory(KVCacheLayout(LAYERFIRST, 2, 32, BLOCK, HEADS, HEAD_SIZE), 2)] for _ in range(4)]
    model = ModelConfig(2, HEADS * 4, HEAD_SIZE, dtype="int16", tp_size=4)
    name = node.serve(data_bytes=1 << 20)
    with Engine(name, tmp_path, model, CacheConfig(BLOCK), memories) as engine:
        engine.wait_ready()
        engine.put(PROMPT, HERE)
        os.kill(worker_of(engine), signal.SIGKILL)
        eventually(lambda: engine.manager.disabled, "the loss of the worker")
        is_back(engine)
        assert engine.get(PROMPT, THERE) == 5 * BLOCK
        assert engine.put(tokens_of(5 * BLOCK, 1), HERE) == 5 * BLOCK
        assert engine.get(tokens_of(5 * BLOCK, 1), THERE) == 5 * BLOCK


def test_a_rank_that_is_refused_again_says_so_once(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine was replaced by ones that its tensors do not fit; it goes on trying."""
    monkeypatch.setattr("flexkv_radix.tp_client._REFUSED_PAUSE_S", 0.1)
    name, others = node.serve(data_bytes=DATA_BYTES), node.serve(data_bytes=DATA_BYTES)
    third = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.manager.shutdown()
        for turn, (server, num_layers) in enumerate(((others, 1), (others, 1), (third, 3))):
            model = small_model(num_layers=num_layers)
            with small_engine(server, tmp_path, model=model, register=False) as other:
                with pytest.raises(RuntimeError, match="could not start"):
                    other.wait_ready()
            num_causes = (1, 1, 2)[turn]
            eventually(lambda n=num_causes: len(warnings_of(caplog, "not registered again")) == n)
        with small_engine(name, tmp_path, register=False) as same:
            same.wait_ready()
            assert not same.manager.disabled
    assert len(warnings_of(caplog, "not registered again")) == 2


def test_events_follow_to_another_region(shm_name: str, tmp_path: Path) -> None:
    events: list[Any] = []
    flags = (*FLAGS, "--kvevent-ring-capacity", "1024")
    with small_engine(shm_name, tmp_path, event_collector=events.extend) as engine:
        with Daemon(shm_name, *flags) as server:
            engine.wait_ready()
            engine.put(PROMPT, HERE)
            eventually(lambda: num_stored(events) == 5, lambda: str(events))
            assert server.stop() == 0
        eventually(lambda: engine.manager.disabled, "the end of the server")
        with Daemon(shm_name, *flags):
            is_back(engine)
            eventually(lambda: AllBlocksCleared() in events, lambda: str(events))
            del events[: events.index(AllBlocksCleared())]
            assert num_stored(events) == 0
            engine.put(PROMPT, HERE)
            eventually(lambda: num_stored(events) == 5, lambda: str(events))
    assert events.count(AllBlocksCleared()) == 1


def num_stored(events: list[Any]) -> int:
    return sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
