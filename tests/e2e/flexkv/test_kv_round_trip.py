"""Bytes that were PUT come back by GET, whatever the layout, the split or the sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine import (
    BLOCK,
    BLOCKFIRST,
    LAYERBLOCK,
    LAYERFIRST,
    Engine,
    RankMemory,
    small_engine,
    tokens_of,
)
from node import Node

from flexkv_radix import CacheConfig, KVCacheLayout, LayerGroupSpec, ModelConfig, OpaqueBlockLayout

NUM_BLOCK = 32
DATA_BYTES = 4 << 20
PROMPT = tokens_of(5 * BLOCK + 3)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]  # engine blocks, no runs


def round_trip(engine: Engine, tokens: np.ndarray = PROMPT) -> None:
    assert engine.put(tokens, HERE) == 5 * BLOCK
    assert engine.get(tokens, THERE) == 5 * BLOCK
    assert engine.put(tokens, HERE) == 0


@pytest.mark.parametrize(("kv_dim", "dtype"), [(1, torch.uint8), (2, torch.int16)])
@pytest.mark.parametrize(
    ("kind", "num_tensors"),
    [(LAYERFIRST, "one"), (LAYERFIRST, "layers"), (LAYERFIRST, "layers*kv"), (BLOCKFIRST, "one"),
     (LAYERBLOCK, "one"), (LAYERBLOCK, "layers")],
)  # fmt: skip
def test_layouts(node: Node, tmp_path: Path, kind, num_tensors: str, dtype: torch.dtype, kv_dim: int) -> None:
    layers, heads, size = 3, 2, 8
    count = {"one": 1, "layers": layers, "layers*kv": layers * kv_dim}[num_tensors]
    memory = RankMemory(KVCacheLayout(kind, layers, NUM_BLOCK, BLOCK, heads, size, kv_dim), count, dtype)
    model = ModelConfig(layers, heads, size, kv_dim, dtype)
    with Engine(node.serve(data_bytes=DATA_BYTES), tmp_path, model, CacheConfig(BLOCK), [[memory]]) as engine:
        round_trip(engine.wait_ready())


@pytest.mark.parametrize("num_tensors", [1, 3])
def test_opaque_blocks(node: Node, tmp_path: Path, num_tensors: int) -> None:
    """Odd sizes, gaps between blocks and between layers."""
    layout = OpaqueBlockLayout(3, NUM_BLOCK, BLOCK, 1001, 1100, 1100 * NUM_BLOCK + 64)
    memory = RankMemory(layout, num_tensors)
    model = ModelConfig(block_bytes=3 * 1001)
    with Engine(node.serve(data_bytes=DATA_BYTES), tmp_path, model, CacheConfig(BLOCK), [[memory]]) as engine:
        round_trip(engine.wait_ready())


def test_several_layer_groups(node: Node, tmp_path: Path) -> None:
    groups = (
        LayerGroupSpec(2, num_kv_heads=2, head_size=8),
        LayerGroupSpec(3, num_kv_heads=1, head_size=6, itemsize=4),
        LayerGroupSpec(1, num_kv_heads=2, head_size=8, tokens_per_entry=4),
    )
    dtypes = [torch.int16, torch.int32, torch.int16]
    memories = [
        RankMemory(group.layout(LAYERFIRST, NUM_BLOCK, BLOCK), group.num_layers, dtype)
        for group, dtype in zip(groups, dtypes, strict=True)
    ]
    model = ModelConfig(layer_groups=groups)
    with Engine(node.serve(data_bytes=DATA_BYTES), tmp_path, model, CacheConfig(BLOCK), [memories]) as engine:
        round_trip(engine.wait_ready())


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_tensor_and_pipeline_parallel(node: Node, tmp_path: Path, tp_size: int, pp_size: int) -> None:
    """Each rank's heads and layers; a pipeline of 3 + 1 layers."""
    stages = [3, 1] if pp_size == 2 else [4]
    ranks = [
        [RankMemory(KVCacheLayout(LAYERFIRST, layers, NUM_BLOCK, BLOCK, 8 // tp_size, 8), layers)]
        for layers in stages
        for _ in range(tp_size)
    ]
    model = ModelConfig(4, 8, 8, 2, "int16", tp_size=tp_size, pp_size=pp_size)
    with Engine(node.serve(data_bytes=DATA_BYTES), tmp_path, model, CacheConfig(BLOCK), ranks) as engine:
        round_trip(engine.wait_ready())


def test_mla_replicas_share_one_copy(node: Node, tmp_path: Path) -> None:
    ranks = [
        [RankMemory(KVCacheLayout(LAYERFIRST, 2, NUM_BLOCK, BLOCK, 1, 36, is_mla=True), 2)] for _ in range(3)
    ]
    model = ModelConfig(2, 1, 36, 1, "int16", tp_size=3)
    assert model.full_slot_bytes(BLOCK) == 2 * BLOCK * 36 * 2
    with Engine(node.serve(data_bytes=DATA_BYTES), tmp_path, model, CacheConfig(BLOCK), ranks) as engine:
        round_trip(engine.wait_ready())


def test_partial_hits_and_masks(node: Node, tmp_path: Path) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        longer = np.concatenate([PROMPT[: 4 * BLOCK], tokens_of(3 * BLOCK, 1)])
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
        assert engine.get(longer, [40, 41, 42, 43, 44, 45, 46]) == 4 * BLOCK
        assert engine.put(longer, [50, 51, 52, 53, 54, 55, 56]) == 3 * BLOCK

        on_gpu = np.ones(len(longer), dtype=bool)
        on_gpu[: 2 * BLOCK + 5] = False  # a third block that is not wanted whole stays where it is
        kept = on_gpu.copy()
        assert engine.get(longer, [20, 21, 22, 23, 24, 25, 26], token_mask=on_gpu) == 4 * BLOCK
        assert (on_gpu == kept).all()
        assert engine.ranks[0][0].is_zero(20)
        assert engine.ranks[0][0].is_zero(22)

        gaps = np.ones(len(longer), dtype=bool)
        gaps[BLOCK : 2 * BLOCK] = False
        gaps[4 * BLOCK] = False
        assert engine.get(longer, [30, 31, 32, 33, 34, 35, 36], token_mask=gaps) == 5 * BLOCK
        assert engine.ranks[0][0].is_zero(31)
        assert engine.ranks[0][0].is_zero(34)


def test_put_mask_stores_a_prefix(node: Node, tmp_path: Path) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        mask = np.ones(len(PROMPT), dtype=bool)
        mask[3 * BLOCK + 1] = False
        assert engine.put(PROMPT, HERE, token_mask=mask) == 3 * BLOCK
        mask = ~mask
        assert engine.put(PROMPT, HERE, token_mask=mask) == 0  # block 3 is not wanted, so nothing behind it
        assert engine.get(PROMPT, THERE) == 3 * BLOCK


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_short_sequences(node: Node, tmp_path: Path, num_tokens: int) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        tokens = tokens_of(num_tokens)
        whole = num_tokens // BLOCK * BLOCK
        assert engine.put(tokens, HERE[: whole // BLOCK]) == whole
        assert engine.get(tokens, THERE[: whole // BLOCK]) == whole


def test_torch_tensors_and_one_call(node: Node, tmp_path: Path) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        tokens = torch.from_numpy(PROMPT)
        engine.compute(PROMPT, HERE)
        slots = torch.from_numpy(np.concatenate([engine.slots(HERE), np.zeros(3, dtype=np.int64)]))
        put = engine.manager.put_async(tokens, slots)
        assert engine.manager.wait(put)[put].return_mask.sum() == 5 * BLOCK
        mask = torch.arange(len(PROMPT)) >= BLOCK
        get = engine.manager.get_async(
            tokens, torch.from_numpy(engine.slots([*THERE[1:], 31])[: mask.sum()]), mask
        )
        response = engine.manager.wait(get)[get]
        assert response.return_mask.sum() == 4 * BLOCK
        assert engine.wrong_blocks(PROMPT, THERE[1:], first=1) == []
