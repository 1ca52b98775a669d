"""Engines behind connectors, all through one KVServer: each is served, as a client of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from daemon import eventually
from engine import BLOCK, environment, tokens_of
from kv_server import EXTERNAL
from node import Node

from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.connectors.vllm.plan import EnginePlan, plan_of
from flexkv_radix.connectors.vllm.scheduler import manager_of
from flexkv_radix.connectors.vllm.worker import WorkerSide

NUM_BLOCKS, LAYERS, HEADS, HEAD_SIZE = 32, 2, 2, 8
LAYER_SHAPE = (NUM_BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE)
BLOCK_BYTES = LAYERS * HEADS * BLOCK * 2 * HEAD_SIZE * 2


def vllm_config(engine_id: str, dp_index: int, dp_size: int) -> Any:
    """What the plan reads of a vLLM configuration."""
    model = SimpleNamespace(
        dtype=torch.float16,
        use_mla=False,
        get_total_num_hidden_layers=lambda: LAYERS,
        get_num_kv_heads=lambda parallel: HEADS,
        get_head_size=lambda: HEAD_SIZE,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=dp_size,
        data_parallel_index=dp_index,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK, num_gpu_blocks=NUM_BLOCKS),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
    )


class Engine:
    """Both halves of a vLLM connector, in one process."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.manager = manager_of(plan, "model")
        self.manager.start()
        self.layers = {
            f"layer {number}": torch.zeros(LAYER_SHAPE, dtype=torch.float16) for number in range(2)
        }
        self.worker = WorkerSide(plan, tp_rank=0, pp_rank=0)
        self.worker.register_kv_caches(self.layers)

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.close()


@contextmanager
def engines(node: Node, directory: Path, *places: tuple[int, int, int]) -> Iterator[list[Engine]]:
    """One for each place: (FLEXKV_INSTANCE_ID, its data-parallel rank, of how many)."""
    name, port = node.serve(data_bytes=64 * BLOCK_BYTES), f"ipc://{directory}/flexkv"
    with ExitStack() as stack:
        made = []
        for instance, dp_index, dp_size in places:
            more = {**EXTERNAL, "FLEXKV_INSTANCE_ID": str(instance)}
            with environment(name, port, more):
                engine_id = f"{directory.name}_{instance}_dp{dp_index}"
                made.append(Engine(plan_of(vllm_config(engine_id, dp_index, dp_size), None)))
            stack.callback(made[-1].close)
        yield made


@pytest.mark.parametrize(
    "places",
    [((0, 0, 1), (1, 0, 1)), ((0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)), ((0, 0, 1), (0, 1, 1))],
    ids=["instances", "instances of two ranks", "ranks of a dense model"],
)
def test_every_engine_of_a_kv_server_is_served(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes], places: tuple[tuple[int, int, int], ...]
) -> None:
    with engines(node, tmp_path, *places) as made:
        for engine in made:
            eventually(engine.manager.is_ready, "KVManager.is_ready()")
            assert engine.manager.disabled == ""
        assert sorted(engine.plan.dp_client_id for engine in made) == list(range(len(places)))
        first, *others = made
        tokens, blocks = tokens_of(4 * BLOCK + 1), [3, 9, 4, 30]
        for layer in first.layers.values():
            layer.copy_(torch.randn(LAYER_SHAPE, generator=torch.Generator().manual_seed(1)))
        cache = SharedCache(first.manager, BLOCK)
        slots = torch.tensor(blocks).repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(4)
        assert cache.start_store("a", tokens[:-1], slots.numpy())
        assert cache.finish_all().stores == {"a": True}
        for other in others:
            loading = SharedCache(other.manager, BLOCK)
            assert loading.lookup("b", tokens) == 4 * BLOCK
            assert loading.start_load("b", slots.numpy())
            assert loading.finish_load("b")
            for name, layer in other.layers.items():
                assert torch.equal(layer[blocks], first.layers[name][blocks])
