"""The whole path on a GPU: KVManager and KVTPClient with CUDA tensors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from engine import BLOCK, BLOCKFIRST, LAYERBLOCK, LAYERFIRST, Engine, RankMemory, tokens_of
from node import Node

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus, ModelConfig
from flexkv_radix.layerwise import LayerEvents

LAYERS, HEADS, HEAD_SIZE, NUM_BLOCK = 4, 8, 64, 64
PROMPT = tokens_of(5 * BLOCK + 3)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
NUM_TENSORS = {LAYERFIRST: LAYERS, BLOCKFIRST: 1, LAYERBLOCK: 1}


def engine_of(name: str, directory: Path, kind=LAYERFIRST, *, ranks: int = 1, environ=None) -> Engine:
    devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]
    layout = KVCacheLayout(kind, LAYERS, NUM_BLOCK, BLOCK, HEADS // ranks, HEAD_SIZE)
    memories = [[RankMemory(layout, NUM_TENSORS[kind], torch.int16, device)] for device in devices]
    model = ModelConfig(LAYERS, HEADS, HEAD_SIZE, dtype="int16", tp_size=ranks)
    return Engine(name, directory, model, CacheConfig(BLOCK), memories, environ=environ)


def compute(engine: Engine, blocks: list[int]) -> None:
    engine.compute(PROMPT, blocks)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", list(NUM_TENSORS))
def test_round_trip(node: Node, tmp_path: Path, kind) -> None:
    with engine_of(node.serve(data_bytes=64 << 20), tmp_path, kind).wait_ready() as engine:
        compute(engine, HERE)
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
        assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_two_ranks(node: Node, tmp_path: Path) -> None:
    with engine_of(node.serve(data_bytes=64 << 20), tmp_path, ranks=2).wait_ready() as engine:
        compute(engine, HERE)
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
        assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_a_store_starts_behind_the_step_that_writes_its_blocks(node: Node, tmp_path: Path) -> None:
    with engine_of(node.serve(data_bytes=64 << 20), tmp_path).wait_ready() as engine:
        task_id, _ = engine.manager.put_match(PROMPT)
        torch.cuda._sleep(1_000_000_000)  # the forward, some 0.5 s
        start_s = time.monotonic()
        for tensor in engine.ranks[0][0].tensors:
            tensor.fill_(1)
        engine.clients[0].record_step()
        engine.manager.launch([task_id], [engine.slots(HERE)])
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        assert time.monotonic() - start_s > 0.1, "the forward was too short to prove anything"
        task_id, _ = engine.manager.get_match(PROMPT)
        for tensor in engine.ranks[0][0].tensors:
            tensor.zero_()
        torch.cuda.synchronize()
        engine.manager.launch([task_id], [engine.slots(THERE)])
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        assert all(bool((tensor[:, THERE] == 1).all()) for tensor in engine.ranks[0][0].tensors)


def test_layerwise(node: Node, tmp_path: Path) -> None:
    environ = {
        "FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1",
        "FLEXKV_LAYERWISE_EVENTFD_SOCKET": str(tmp_path / "eventfds"),
    }
    with engine_of(node.serve(data_bytes=64 << 20), tmp_path, environ=environ).wait_ready() as engine:
        events = LayerEvents(LAYERS)
        events.connect(str(tmp_path / "eventfds"), 0, 1, timeout_s=20)
        compute(engine, HERE)
        engine.put(PROMPT, HERE)
        task_id, _ = engine.manager.get_match(PROMPT)
        engine.manager.launch([task_id], [engine.slots(THERE)], layerwise_transfer=True, counter_id=1)
        for layer in range(LAYERS):
            events.wait(1, layer, timeout_s=20)
        assert engine.wrong_blocks(PROMPT, THERE) == []
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        events.close()
