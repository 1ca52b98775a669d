"""Layerwise loads that cannot be: nobody would signal a layer, so the forward has to know before it waits."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon import eventually
from engine import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERFIRST,
    SMALL_SLOT_BYTES,
    Engine,
    RankMemory,
    small_engine,
    tokens_of,
)
from kv_server import EXTERNAL, children_of, start_server
from node import Node
from stopping import stopped

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus, ModelConfig
from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.layerwise import LayerEvents, LayerLoadFailed

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES


@contextmanager
def loading_engine(node: Node, directory: Path, **environ: str) -> Iterator[tuple[Engine, LayerEvents]]:
    """An engine that loads layer by layer, with PROMPT in its cache."""
    environ["FLEXKV_ENABLE_LAYERWISE_TRANSFER"] = "1"
    environ["FLEXKV_LAYERWISE_EVENTFD_SOCKET"] = str(directory / "eventfds")
    with small_engine(node.serve(data_bytes=DATA_BYTES), directory, environ=environ).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(str(directory / "eventfds"), 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        yield engine, events
        events.close()


def launch(engine: Engine, *tasks: int, **options: bool) -> list[int]:
    slots = [engine.slots(THERE)] * len(tasks)
    return engine.manager.launch(tasks, slots, layerwise_transfer=True, **options)


def load(engine: Engine, events: LayerEvents) -> None:
    """A load as it should be."""
    events.reset(0)
    task_id, mask = engine.manager.get_match(PROMPT)
    assert mask.all()
    launch(engine, task_id)
    for layer in range(2):
        events.wait(0, layer, timeout_s=20)
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.wrong_blocks(PROMPT, THERE) == []


def back(engine: Engine) -> None:
    """The worker was killed: wait until there is another."""
    eventually(lambda: engine.manager.disabled, "the loss of the worker")
    eventually(lambda: not engine.manager.disabled, lambda: engine.manager.disabled)


def test_a_cancelled_load(node: Node, tmp_path: Path) -> None:
    with loading_engine(node, tmp_path) as (engine, events):
        cancelled, other = (engine.manager.get_match(PROMPT)[0] for _ in range(2))
        engine.manager.cancel([cancelled])
        for as_batch in (False, True):
            with pytest.raises(ValueError, match=f"layerwise_transfer: .* task {cancelled} .*CANCELLED"):
                launch(engine, other, cancelled, as_batch=as_batch)
            engine.expect(other, KVResponseStatus.UNREADY)
        engine.expect(cancelled, KVResponseStatus.CANCELLED)
        engine.manager.cancel([other])
        load(engine, events)


@pytest.mark.parametrize("environ", [{}, EXTERNAL], ids=["in process", "KVServer"])
def test_a_load_matched_before_the_worker_died(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes], environ: dict[str, str]
) -> None:
    with loading_engine(node, tmp_path, **environ) as (engine, events):
        task_id, _ = engine.manager.get_match(PROMPT)
        [worker] = children_of(server.pid if environ else os.getpid()) - {server.pid}
        os.kill(worker, signal.SIGKILL)
        back(engine)
        events.reset(0)
        with pytest.raises(ValueError, match=r"layerwise_transfer: .*FAILED.*worker died"):
            launch(engine, task_id)
        engine.expect(task_id, KVResponseStatus.FAILED)
        load(engine, events)


def test_a_load_matched_before_the_server_died(node: Node, tmp_path: Path) -> None:
    first = start_server(tmp_path)
    with loading_engine(node, tmp_path, **EXTERNAL) as (engine, events):
        tasks = [engine.manager.get_match(PROMPT)[0] for _ in range(2)]
        first.kill()
        first.wait()
        again = start_server(tmp_path)
        back(engine)
        events.reset(0)
        with pytest.raises(ValueError, match=r"layerwise_transfer: .*server is gone"):
            launch(engine, tasks[0])
        with pytest.raises(ValueError, match=r"layerwise_transfer: .*server is gone"):
            launch(engine, *tasks, as_batch=True)
        for task_id in tasks:
            engine.expect(task_id, KVResponseStatus.FAILED)
        load(engine, events)
    again.terminate()
    assert again.wait(20) == 0


def test_a_worker_that_reads_nothing(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv_radix.transfer.wire.MAX_BACKLOG_BYTES", 20_000)
    with loading_engine(node, tmp_path) as (engine, events):
        tasks: list[int] = []
        with stopped(engine.manager._backend._driver.worker.pid):
            for _ in range(800):
                tasks.append(engine.manager.get_match(PROMPT)[0])
                try:
                    launch(engine, tasks[-1])
                except ValueError as error:
                    refusal = error
                    break
            assert "does not read" in str(refusal)
            engine.expect(tasks[-1], KVResponseStatus.FAILED)
        assert {answer.status for answer in engine.manager.wait(tasks[:-1]).values()} == {
            KVResponseStatus.SUCCESS
        }
        load(engine, events)


def test_a_connector_does_not_start_such_a_load(node: Node, tmp_path: Path) -> None:
    with loading_engine(node, tmp_path) as (engine, events):
        cache = SharedCache(engine.manager, BLOCK)
        assert cache.lookup("request", PROMPT) == 5 * BLOCK
        os.kill(engine.manager._backend._driver.worker.pid, signal.SIGKILL)
        back(engine)
        assert not cache.start_load("request", engine.slots(THERE), layerwise=True)
        assert cache.num_running == 0
        load(engine, events)


def test_a_rank_hears_that_another_is_gone(node: Node, tmp_path: Path) -> None:
    """It left between the match and the launch: the load fails, and who waits for its layers is told."""
    layers, ranks = 2, 2
    memories = [
        [RankMemory(KVCacheLayout(LAYERFIRST, layers, 32, BLOCK, HEADS, HEAD_SIZE), layers)]
        for _ in range(ranks)
    ]
    model = ModelConfig(layers, HEADS * ranks, HEAD_SIZE, dtype="int16", tp_size=ranks)
    environ = {
        "FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1",
        "FLEXKV_LAYERWISE_EVENTFD_SOCKET": str(tmp_path / "eventfds"),
    }
    name = node.serve(data_bytes=1 << 20)
    with Engine(name, tmp_path, model, CacheConfig(BLOCK), memories, environ=environ) as engine:
        engine.wait_ready()
        events = LayerEvents(layers)
        events.connect(str(tmp_path / "eventfds"), 0, ranks, timeout_s=20)
        engine.put(PROMPT, HERE)
        events.reset(0)
        task_id, _ = engine.manager.get_match(PROMPT)
        engine.clients[1].close()
        launch(engine, task_id)
        with pytest.raises(LayerLoadFailed):
            events.wait(0, 0, timeout_s=20)
        assert "is gone" in engine.expect(task_id, KVResponseStatus.FAILED).error
        events.close()
