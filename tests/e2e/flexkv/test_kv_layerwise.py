"""Layerwise loads through KVManager: the eventfd protocol as an engine's ranks speak it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import termios
import time
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
    small_memory,
    small_model,
    tokens_of,
)
from node import Node
from stopping import stopped

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus, ModelConfig, SWAPoolConfig
from flexkv_radix.layerwise import LayerEvents, LayerLoadFailed
from flexkv_radix.transfer.protocol import TransferDied
from flexkv_radix.transfer.wire import listen

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]


def environ(directory: Path) -> dict[str, str]:
    return {
        "FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1",
        "FLEXKV_LAYERWISE_EVENTFD_SOCKET": str(directory / "eventfds"),
    }


def test_layers_are_signalled_in_order(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ(tmp_path)).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        for counter_id in (0, 1, 2, 0):
            events.reset(counter_id)
            task_id, _ = engine.manager.get_match(PROMPT)
            engine.manager.launch(
                [task_id],
                [engine.slots(THERE)],
                as_batch=True,
                layerwise_transfer=True,
                counter_id=counter_id,
            )
            for layer in range(2):
                events.wait(counter_id, layer, timeout_s=20)
            engine.expect(task_id, KVResponseStatus.SUCCESS)
            assert engine.wrong_blocks(PROMPT, THERE) == []
        events.close()


def test_an_engine_with_many_open_files(node: Node, tmp_path: Path, many_files) -> None:
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ(tmp_path)).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        events.reset(0)
        task_id, _ = engine.manager.get_match(PROMPT)
        engine.manager.launch([task_id], [engine.slots(THERE)], layerwise_transfer=True)
        events.wait(0, 1, timeout_s=20)
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        assert engine.wrong_blocks(PROMPT, THERE) == []
        assert engine.clients[0].wait_registered(0)
        events.close()


def test_each_rank_has_its_own_eventfds(node: Node, tmp_path: Path) -> None:
    layers, ranks = 3, 2
    memories = [
        [RankMemory(KVCacheLayout(LAYERFIRST, layers, 32, BLOCK, HEADS, HEAD_SIZE), layers)]
        for _ in range(ranks)
    ]
    model = ModelConfig(layers, HEADS * ranks, HEAD_SIZE, dtype="int16", tp_size=ranks)
    name = node.serve(data_bytes=1 << 20)
    with Engine(name, tmp_path, model, CacheConfig(BLOCK), memories, environ=environ(tmp_path)) as engine:
        engine.wait_ready()
        events = [LayerEvents(layers) for _ in range(ranks)]
        for rank, one in enumerate(events):
            one.connect(str(tmp_path / "eventfds"), rank, ranks, timeout_s=20)
        engine.put(PROMPT, HERE)
        task_id, _ = engine.manager.get_match(PROMPT)
        engine.manager.launch([task_id], [engine.slots(THERE)], layerwise_transfer=True)
        for one in events:
            for layer in range(layers):
                one.wait(0, layer, timeout_s=20)
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        assert engine.wrong_blocks(PROMPT, THERE) == []
        for one in events:
            one.close()


def test_a_failed_load_is_told_to_who_waits_for_its_layers(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ(tmp_path)).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        task_id, _ = engine.manager.get_match(PROMPT)
        engine.manager.launch(
            [task_id], [engine.slots([20, 1, 2, 29, 64])], layerwise_transfer=True, counter_id=1
        )
        engine.expect(task_id, KVResponseStatus.FAILED)
        with pytest.raises(LayerLoadFailed):
            events.wait(1, 0, timeout_s=20)
        events.close()


def test_a_store_does_not_go_layer_by_layer(node: Node, tmp_path: Path) -> None:
    """Refused before anything is changed, also where a load stands in front of it."""
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ(tmp_path)).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        get, _ = engine.manager.get_match(PROMPT)
        engine.compute(tokens_of(BLOCK, 1), [40])
        put, _ = engine.manager.put_match(tokens_of(BLOCK, 1))
        slots = [engine.slots(THERE), engine.slots([40])]
        with pytest.raises(ValueError, match="layerwise_transfer"):
            engine.manager.launch([get, put], slots, layerwise_transfer=True)
        engine.expect(get, KVResponseStatus.UNREADY)
        with pytest.raises(ValueError, match="layerwise_transfer"):
            engine.manager.launch([put], slots[1:], as_batch=True, layerwise_transfer=True)
        engine.manager.launch([get, put], slots)
        engine.expect(get, KVResponseStatus.SUCCESS)
        engine.expect(put, KVResponseStatus.SUCCESS)


def test_another_listens_where_an_engine_without_cache_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and serves on for the reason that it gave before."""
    monkeypatch.setattr("flexkv_radix.transfer.wire._LISTEN_TIMEOUT_S", -1.0)
    switched_off = {**environ(tmp_path), "FLEXKV_ENABLE_RADIXSHMEM": "0"}
    with listen(str(tmp_path / "eventfds")), small_engine("/none", tmp_path, environ=switched_off) as engine:
        eventually(lambda: "give each engine its own path" in caplog.text, "the warning")
        assert "FLEXKV_ENABLE_RADIXSHMEM" in engine.wait_ready().manager.disabled
    assert len(caplog.records) == 2, caplog.text


def test_a_silent_rank_holds_up_no_shutdown(tmp_path: Path) -> None:
    """One that connected and says nothing, and one that stops in the middle of its handshake."""
    path = tmp_path / "eventfds"
    switched_off = {**environ(tmp_path), "FLEXKV_ENABLE_RADIXSHMEM": "0"}
    with small_engine("/none", tmp_path, environ=switched_off) as engine:
        eventually(path.exists, "the socket for eventfds")
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as slow:
            silent.connect(str(path))
            slow.connect(str(path))
            slow.sendall(bytes(8))
            eventually(lambda: num_unread_bytes(slow) == 0, "that somebody listens")
            events = LayerEvents(2)
            events.connect(str(path), 0, 1, timeout_s=20)
            events.close()
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 2


def test_a_shutdown_in_the_middle_of_a_handshake(tmp_path: Path) -> None:
    path = tmp_path / "eventfds"
    switched_off = {**environ(tmp_path), "FLEXKV_ENABLE_RADIXSHMEM": "0"}
    with small_engine("/none", tmp_path, environ=switched_off) as engine:
        eventually(path.exists, "the socket for eventfds")
        with socket.socket(socket.AF_UNIX) as slow:
            slow.connect(str(path))
            slow.sendall(bytes(8))
            eventually(lambda: num_unread_bytes(slow) == 0, "that somebody listens")
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 2


def test_a_shutdown_while_another_listens_for_eventfds(tmp_path: Path) -> None:
    switched_off = {**environ(tmp_path), "FLEXKV_ENABLE_RADIXSHMEM": "0"}
    with listen(str(tmp_path / "eventfds")), small_engine("/none", tmp_path, environ=switched_off) as engine:
        engine.wait_ready()
        start_s = time.monotonic()
        engine.manager.shutdown()
        assert time.monotonic() - start_s < 2


def num_unread_bytes(sock: socket.socket) -> int:
    """What was sent over a Unix socket and is not received yet, with the kernel's own share."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_a_replaced_worker_is_given_the_eventfds_again(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ(tmp_path)).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        os.kill(engine.manager._backend._driver.worker.pid, signal.SIGKILL)
        eventually(lambda: engine.manager.disabled, "the loss of the worker")
        with pytest.raises(TransferDied):
            events.wait(0, 0, timeout_s=20)
        eventually(lambda: not engine.manager.disabled, lambda: engine.manager.disabled)
        for counter_id in (0, 1, 2):
            events.reset(counter_id)
            task_id, _ = engine.manager.get_match(PROMPT)
            engine.manager.launch(
                [task_id], [engine.slots(THERE)], layerwise_transfer=True, counter_id=counter_id
            )
            for layer in range(2):
                events.wait(counter_id, layer, timeout_s=20)
            engine.expect(task_id, KVResponseStatus.SUCCESS)
            assert engine.wrong_blocks(PROMPT, THERE) == []
        events.close()


@pytest.mark.parametrize("swa_aware", [True, False])
def test_layers_of_the_window_follow_the_others(node: Node, tmp_path: Path, swa_aware: bool) -> None:
    """A hybrid model: 2 layers of full attention, then 1 with a window; all are signalled, once each.

    Without the window's blocks its layers are signalled too: nothing has to come for them.
    """
    window = SWAPoolConfig(2 * BLOCK, num_layers=1, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype="int16")
    swa = RankMemory(KVCacheLayout(LAYERFIRST, 1, 64, BLOCK, HEADS, HEAD_SIZE), 1)
    here_swa, there_swa = [50, 51], [40, 41]
    name = node.serve(data_bytes=1 << 20, swa_ratio=0.5)
    with Engine(
        name, tmp_path, small_model(), CacheConfig(BLOCK, swa=window), [[small_memory()]], swa=[swa],
        environ=environ(tmp_path),
    ) as engine:  # fmt: skip
        engine.wait_ready()
        events = LayerEvents(3)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        engine.compute(PROMPT, HERE, swa_blocks=here_swa)
        put, _ = engine.manager.put_match(PROMPT)
        engine.manager.launch([put], [engine.slots(HERE)], [engine.slots(here_swa)])
        engine.expect(put, KVResponseStatus.SUCCESS)
        events.reset(0)
        get, mask = engine.manager.get_match(PROMPT, swa_aware=swa_aware)
        assert mask.all()
        engine.manager.launch(
            [get],
            [engine.slots(THERE)],
            [engine.slots(there_swa)] if swa_aware else None,
            layerwise_transfer=True,
        )
        events.wait(0, 0, timeout_s=20)
        events.wait(0, 1, timeout_s=20)
        assert engine.wrong_blocks(PROMPT, THERE) == []
        events.wait(0, 2, timeout_s=20)
        assert engine.wrong_blocks(PROMPT, THERE, swa_blocks=there_swa if swa_aware else ()) == []
        engine.expect(get, KVResponseStatus.SUCCESS)
        assert not any(select.select(fds, [], [], 0)[0] for fds in events._fds), "signalled twice"
        events.close()


def test_a_failed_load_does_not_fail_the_next(node: Node, tmp_path: Path) -> None:
    """Also if nobody waited for the failed one, so that its failure is still unread."""
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ(tmp_path)).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        task_id, _ = engine.manager.get_match(PROMPT)
        engine.manager.launch([task_id], [engine.slots([20, 1, 2, 29, 64])], layerwise_transfer=True)
        engine.expect(task_id, KVResponseStatus.FAILED)
        events.reset(0)
        with stopped(engine.manager._backend._driver.worker.pid):
            task_id, _ = engine.manager.get_match(PROMPT)
            engine.manager.launch([task_id], [engine.slots(THERE)], layerwise_transfer=True)
            with pytest.raises(TimeoutError):  # not LayerLoadFailed
                events.wait(0, 0, timeout_s=0.05)
        for layer in range(2):
            events.wait(0, layer, timeout_s=20)
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        assert engine.wrong_blocks(PROMPT, THERE) == []
        events.close()
