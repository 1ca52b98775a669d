"""A KVServer that is killed while a GPU loads: its worker's copies end before their tasks do."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from daemon import eventually
from engine import BLOCK, LAYERFIRST, Engine, RankMemory, tokens_of
from kv_server import EXTERNAL, start_server
from node import Node

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus, ModelConfig

LAYERS, HEADS, HEAD_SIZE, NUM_BLOCK = 8, 8, 128, 2000  # 1 GiB: some 20 ms a load
PROMPT = tokens_of(NUM_BLOCK * BLOCK)
BLOCKS = list(range(NUM_BLOCK))
STORED, REUSED = 7, 3
NUM_LOADS = 12
WATCHED_S = 0.5  # a killed process is torn down in some 0.1 s


def test_no_byte_is_loaded_after_the_answer(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv_radix.server.lines._CHECK_MS", 1)  # so that the death is seen at once
    memory = RankMemory(
        KVCacheLayout(LAYERFIRST, LAYERS, NUM_BLOCK, BLOCK, HEADS, HEAD_SIZE), LAYERS, device="cuda"
    )
    model = ModelConfig(LAYERS, HEADS, HEAD_SIZE, dtype="int16")
    name = node.serve(data_bytes=1100 << 20)
    with Engine(name, tmp_path, model, CacheConfig(BLOCK), [[memory]], environ=EXTERNAL) as engine:
        for turn in range(4):
            with ExitStack() as stack:
                server = start_server(tmp_path)
                stack.callback(server.wait)
                stack.callback(server.kill)
                eventually(lambda: engine.manager.is_ready() and not engine.manager.disabled, timeout_s=60)
                if turn == 0:
                    fill(memory, STORED)
                    engine.expect(store(engine), KVResponseStatus.SUCCESS)
                first, *others = [load(engine) for _ in range(NUM_LOADS)]
                engine.expect(first, KVResponseStatus.SUCCESS)
                server.kill()
                statuses = [response.status for response in engine.manager.wait(others).values()]
                fill(memory, REUSED)
            assert KVResponseStatus.FAILED in statuses
            end_s = time.monotonic() + WATCHED_S
            while time.monotonic() < end_s:
                assert all(bool((tensor == REUSED).all()) for tensor in memory.tensors), turn


def store(engine: Engine) -> int:
    task_id, mask = engine.manager.put_match(PROMPT)
    assert mask.all()
    engine.manager.launch([task_id], [engine.slots(BLOCKS)])
    return task_id


def load(engine: Engine) -> int:
    task_id, mask = engine.manager.get_match(PROMPT)
    assert mask.all()
    engine.manager.launch([task_id], [engine.slots(BLOCKS)])
    return task_id


def fill(memory: RankMemory, value: int) -> None:
    for tensor in memory.tensors:
        tensor.fill_(value)
    torch.cuda.synchronize()
