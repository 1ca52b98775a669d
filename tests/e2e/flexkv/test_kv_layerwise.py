"""Layerwise loads through KVManager: the eventfd protocol as an engine's ranks speak it."""

from __future__ import annotations

from pathlib import Path

import pytest
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
from node import Node

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus, ModelConfig
from flexkv_radix.layerwise import LayerEvents, LayerLoadFailed

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
