"""Blocks arrive in slots byte for byte, and come back, for every layout a rank may have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shared_engine import EnginePart, EngineRank, kv_part, open_store, scramble, start_engine

from flexkv_radix.layout import KVCacheLayout, KVCacheLayoutType, OpaqueBlockLayout
from flexkv_radix.transfer.protocol import OpKind, RankPlace
from radixshmem.geometry import ComponentType

FULL, SWA = ComponentType.FULL, ComponentType.SWA
LAYERFIRST, BLOCKFIRST, LAYERBLOCK = KVCacheLayoutType
NUM_SLOTS = 29


def _groups() -> EnginePart:
    """Three KV shapes in one model: different heads, MLA, and layers of one tensor each."""
    layouts = [
        KVCacheLayout(LAYERFIRST, 2, 11, 4, 2, 16),
        KVCacheLayout(LAYERBLOCK, 3, 11, 4, 1, 9, kv_dim=1),
        KVCacheLayout(LAYERFIRST, 2, 12, 2, 1, 8),
    ]
    return EnginePart(FULL, layouts, [1, 3, 4])


def _opaque(layer_gap: int, num_tensors: int) -> EnginePart:
    num_layers, num_blocks, per_layer, stride = 3, 11, 1037, 1101
    layer_stride = num_blocks * stride + layer_gap if num_tensors == 1 else 0
    layout = OpaqueBlockLayout(num_layers, num_blocks, 4, per_layer, stride, layer_stride)
    return EnginePart(FULL, [layout], [num_tensors])


def _interleaved() -> EnginePart:
    """All layers of a block side by side in one storage, as bytes."""
    return EnginePart(FULL, [OpaqueBlockLayout(4, 11, 4, 512, 4 * 512, 512)], [1])


PARTS = {
    "layerfirst": lambda: kv_part(LAYERFIRST),
    "layerfirst-mla": lambda: kv_part(LAYERFIRST, kv_dim=1),
    "layerfirst-per-layer": lambda: kv_part(LAYERFIRST, num_tensors=3),
    "layerfirst-per-layer-kv": lambda: kv_part(LAYERFIRST, num_tensors=6),
    "blockfirst": lambda: kv_part(BLOCKFIRST),
    "blockfirst-mla": lambda: kv_part(BLOCKFIRST, kv_dim=1),
    "layerblock": lambda: kv_part(LAYERBLOCK),
    "layerblock-mla": lambda: kv_part(LAYERBLOCK, kv_dim=1),
    "layerblock-per-layer": lambda: kv_part(LAYERBLOCK, num_tensors=3),
    "groups": _groups,
    "opaque-tensors": lambda: _opaque(0, 3),
    "opaque-one-storage": lambda: _opaque(100, 1),
    "opaque-interleaved": _interleaved,
}


def _pick(rng: np.random.Generator, num_blocks: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.permutation(num_blocks)[:n], rng.permutation(NUM_SLOTS)[:n]


def check_round_trip(engine, parts, rng, component=FULL, *, rounds: int = 6) -> None:
    """Random stores and loads against a model of what slots and blocks must hold.

    parts: (part, first byte of its share in the slot, whether it stores).
    """
    slots = engine.store.slots(component)
    num_blocks = min(part.num_blocks for part, _, _ in parts)
    for _ in range(rounds):
        n = int(rng.integers(0, num_blocks + 1))
        for part, _, _ in parts:
            scramble(rng, *part.tensors)
        scramble(rng, slots)
        blocks, ids = _pick(rng, num_blocks, n)
        expected = slots.copy()
        for part, start, stores in parts:
            if stores:
                expected[ids, start : start + part.share_bytes] = part.blocks()[blocks]
        (result,) = engine.run(engine.op(OpKind.D2H, blocks, ids, component))
        assert result.ok, result.error
        assert result.num_bytes == n * slots.shape[1]
        assert np.array_equal(slots, expected)

        targets, ids = _pick(rng, num_blocks, n)
        expected_blocks = [part.blocks() for part, _, _ in parts]
        for blocks_of_rank, (part, start, _) in zip(expected_blocks, parts, strict=True):
            blocks_of_rank[targets] = slots[ids, start : start + part.share_bytes]
        (result,) = engine.run(engine.op(OpKind.H2D, targets, ids, component))
        assert result.ok, result.error
        for blocks_of_rank, (part, _, _) in zip(expected_blocks, parts, strict=True):
            assert np.array_equal(part.blocks(), blocks_of_rank)


@pytest.mark.parametrize("name", PARTS)
def test_every_layout(name: str, tmp_path: Path) -> None:
    part = PARTS[name]()
    rng = np.random.default_rng(7)
    with open_store({FULL: part.share_bytes}, NUM_SLOTS, slot_gap_bytes=24) as store:
        scramble(rng, store.gaps())
        gaps = store.gaps().copy()
        with start_engine(
            store, [EngineRank(RankPlace(), [part])], tmp_path, copy_threads=1 + len(name) % 3
        ) as engine:
            check_round_trip(engine, [(part, 0, True)], rng)
        assert np.array_equal(store.gaps(), gaps)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(size: int, tmp_path: Path) -> None:
    """Ranks in processes of their own, each with its share of the slot."""
    parts = [kv_part(kind) for kind in (LAYERFIRST, BLOCKFIRST, LAYERBLOCK, LAYERFIRST)[:size]]
    share = parts[0].share_bytes
    with open_store({FULL: size * share}, NUM_SLOTS) as store:
        ranks = [EngineRank(RankPlace(tp_rank=rank), [part]) for rank, part in enumerate(parts)]
        with start_engine(store, ranks, tmp_path) as engine:
            placed = [(part, rank * share, True) for rank, part in enumerate(parts)]
            check_round_trip(engine, placed, np.random.default_rng(size))


def test_replicas_store_once_and_load_everywhere(tmp_path: Path) -> None:
    parts = [kv_part(LAYERFIRST, kv_dim=1, replicated=True) for _ in range(2)]
    with open_store({FULL: parts[0].share_bytes}, NUM_SLOTS) as store:
        ranks = [EngineRank(RankPlace(tp_rank=rank), [part]) for rank, part in enumerate(parts)]
        with start_engine(store, ranks, tmp_path) as engine:
            rng = np.random.default_rng(5)
            scramble(rng, parts[0].tensors[0], parts[1].tensors[0])
            (result,) = engine.run(engine.op(OpKind.D2H, [3], [4]))
            assert (result.ok, result.num_bytes) == (True, parts[0].share_bytes)
            (result,) = engine.run(engine.op(OpKind.H2D, [7], [4]))
            assert (result.ok, result.num_bytes) == (True, 2 * parts[0].share_bytes)
            assert all(np.array_equal(part.block(7), parts[0].block(3)) for part in parts)


def test_pipeline_stages_fill_one_slot(tmp_path: Path) -> None:
    parts = [kv_part(LAYERFIRST, num_layers=2), kv_part(LAYERFIRST, num_layers=3)]
    with open_store({FULL: sum(part.share_bytes for part in parts)}, NUM_SLOTS) as store:
        ranks = [EngineRank(RankPlace(pp_rank=stage), [part]) for stage, part in enumerate(parts)]
        with start_engine(store, ranks, tmp_path) as engine:
            placed = [(parts[0], 0, True), (parts[1], parts[0].share_bytes, True)]
            check_round_trip(engine, placed, np.random.default_rng(3))


def test_components_have_pools_of_their_own(tmp_path: Path) -> None:
    full, swa = kv_part(LAYERFIRST), kv_part(BLOCKFIRST, num_layers=2, component=SWA)
    with open_store({FULL: full.share_bytes, SWA: swa.share_bytes}, NUM_SLOTS) as store:
        with start_engine(store, [EngineRank(RankPlace(), [full, swa])], tmp_path) as engine:
            rng = np.random.default_rng(11)
            scramble(rng, store.slots(SWA))
            untouched = store.slots(SWA).copy()
            check_round_trip(engine, [(full, 0, True)], rng, FULL, rounds=2)
            assert np.array_equal(store.slots(SWA), untouched)
            check_round_trip(engine, [(swa, 0, True)], rng, SWA, rounds=2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_large_blocks_are_shared_among_threads(seed: int, tmp_path: Path) -> None:
    """Blocks larger than the unit that threads take, at odd sizes."""
    layout = OpaqueBlockLayout(2, 5, 4, 300_007, 300_011)
    part = EnginePart(FULL, [layout], [2])
    with open_store({FULL: part.share_bytes}, NUM_SLOTS) as store:
        with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path, copy_threads=3) as engine:
            check_round_trip(engine, [(part, 0, True)], np.random.default_rng(seed), rounds=2)
