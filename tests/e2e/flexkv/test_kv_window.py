"""Models with sliding-window layers: FULL and SWA move together, and a hit needs both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from engine import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERFIRST,
    Engine,
    RankMemory,
    small_memory,
    small_model,
    tokens_of,
)
from node import Node

from flexkv_radix import CacheConfig, KVCacheLayout, KVResponseStatus, SWAPoolConfig
from radixshmem import ComponentType

WINDOW = 3
NUM_BLOCK = 64
PROMPT = tokens_of(6 * BLOCK)
HERE, THERE = [10, 11, 12, 13, 14, 15], [30, 31, 32, 33, 34, 35]
HERE_SWA, THERE_SWA = [50, 51, 52], [40, 41, 42]


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    window = SWAPoolConfig(
        WINDOW * BLOCK, num_layers=1, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype="int16"
    )
    cache = CacheConfig(BLOCK, swa=window)
    swa_memory = RankMemory(KVCacheLayout(LAYERFIRST, 1, NUM_BLOCK, BLOCK, HEADS, HEAD_SIZE), 1)
    ranks = [[small_memory(NUM_BLOCK)]]
    with ExitStack() as stack:
        name = Node(stack).serve(data_bytes=64 << 10, swa_ratio=0.5)
        directory = tmp_path_factory.mktemp("engine")
        one = Engine(name, directory, small_model(), cache, ranks, swa=[swa_memory])
        yield stack.enter_context(one).wait_ready()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine with an empty cache and zeroed KV."""
    for memory in (*shared_engine.ranks[0], *shared_engine.swa):
        for tensor in memory.tensors:
            tensor.zero_()
    yield shared_engine
    shared_engine.manager._backend.cancel_all()
    shared_engine.manager._backend.tier.client.reset()


def put(engine: Engine, tokens=PROMPT, here=HERE, here_swa=HERE_SWA, **options) -> int:
    engine.compute(tokens, here, swa_blocks=here_swa)
    task_id, mask = engine.manager.put_match(tokens, **options)
    moved = here[len(here) - int(mask.sum()) // BLOCK :]
    engine.manager.launch([task_id], [engine.slots(moved)], [engine.slots(here_swa)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    return int(mask.sum())


def test_counts(engine: Engine) -> None:
    assert engine.cache.swa.num_slots > 0
    assert engine.cache.num_cpu_blocks > 0


def test_window_travels_along(engine: Engine) -> None:
    assert put(engine) == 6 * BLOCK
    task_id, mask = engine.manager.get_match(PROMPT, swa_aware=True)
    assert mask.sum() == 6 * BLOCK
    engine.manager.launch([task_id], [engine.slots(THERE)], [engine.slots(THERE_SWA)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.wrong_blocks(PROMPT, THERE, swa_blocks=THERE_SWA) == []


def test_a_mapping_for_every_token_is_cut_to_the_window(engine: Engine) -> None:
    engine.compute(PROMPT, HERE, swa_blocks=HERE_SWA)
    task_id, _ = engine.manager.put_match(PROMPT)
    engine.manager.launch([task_id], [engine.slots(HERE)], [engine.slots([0, 1, 2, *HERE_SWA])])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    task_id, _ = engine.manager.get_match(PROMPT, swa_aware=True)
    engine.manager.launch([task_id], [engine.slots(THERE)], [engine.slots([0, 1, 2, *THERE_SWA])])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.wrong_blocks(PROMPT, THERE, swa_blocks=THERE_SWA) == []
    assert engine.swa[0].is_zero(0)


def test_window_of_wanted_blocks_alone(engine: Engine) -> None:
    """The engine has the first four blocks, their window included: the last two move."""
    put(engine)
    wanted = np.arange(len(PROMPT)) >= 4 * BLOCK
    task_id, mask = engine.manager.get_match(PROMPT, wanted, swa_aware=True)
    assert mask.sum() == 2 * BLOCK
    engine.manager.launch([task_id], [engine.slots(THERE[4:])], [engine.slots(THERE_SWA[1:])])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.wrong_blocks(PROMPT, THERE[4:], first=4, swa_blocks=THERE_SWA[1:]) == []


def test_without_its_window_a_prefix_is_no_hit(engine: Engine) -> None:
    task_id, _ = engine.manager.put_match(PROMPT)
    engine.compute(PROMPT, HERE)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.manager.get_match(PROMPT, swa_aware=True)[1].sum() == 0
    full, mask = engine.manager.get_match(PROMPT)
    assert mask.sum() == 6 * BLOCK
    engine.manager.cancel([full])


def test_a_missing_window_can_be_stored_later(engine: Engine) -> None:
    test_without_its_window_a_prefix_is_no_hit(engine)
    task_id, mask = engine.manager.put_match(PROMPT)
    assert not mask.any()
    engine.expect(task_id, KVResponseStatus.SUCCESS)  # who does not ask for the window has nothing to do
    assert put(engine, swa_aware=True) == 0
    test_window = engine.manager.get_match(PROMPT, swa_aware=True)
    assert test_window[1].sum() == 6 * BLOCK
    engine.manager.launch([test_window[0]], [engine.slots(THERE)], [engine.slots(THERE_SWA)])
    engine.expect(test_window[0], KVResponseStatus.SUCCESS)
    assert engine.wrong_blocks(PROMPT, THERE, swa_blocks=THERE_SWA) == []


def test_wrong_window_mappings_are_refused(engine: Engine) -> None:
    engine.compute(PROMPT, HERE, swa_blocks=HERE_SWA)
    task_id, _ = engine.manager.put_match(PROMPT)
    with pytest.raises(ValueError, match="swa_slot_mappings"):
        engine.manager.launch([task_id], [engine.slots(HERE)], [engine.slots([1, 2, 3, 4])])
    engine.manager.launch([task_id], [engine.slots(HERE)], [engine.slots(HERE_SWA)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    task_id, _ = engine.manager.get_match(PROMPT, swa_aware=True)
    for wrong in (None, engine.slots(THERE_SWA[:2])):
        with pytest.raises(ValueError, match="swa_slot_mappings"):
            engine.manager.launch([task_id], [engine.slots(THERE)], [wrong])
    engine.manager.cancel([task_id])
    task_id, _ = engine.manager.get_match(PROMPT)
    with pytest.raises(ValueError, match="swa_slot_mappings"):
        engine.manager.launch([task_id], [engine.slots(THERE)], [engine.slots(THERE_SWA)])
    engine.manager.cancel([task_id])


def test_a_cancelled_put_gives_both_pools_back(engine: Engine) -> None:
    client = engine.manager._backend.tier.client
    before = client.mempool_free(), client.swa_mempool_free()
    engine.compute(PROMPT, HERE, swa_blocks=HERE_SWA)
    task_id, _ = engine.manager.put_match(PROMPT)
    engine.manager.launch([task_id], [engine.slots([0, 1, 2, 3, 4, NUM_BLOCK])], [engine.slots(HERE_SWA)])
    engine.expect(task_id, KVResponseStatus.FAILED)
    assert (client.mempool_free(), client.swa_mempool_free()) == before


@contextmanager
def no_window_slots(engine: Engine) -> Iterator[None]:
    """Within, all slots of the window's pool are staged for something else."""
    tier = engine.manager._backend.tier
    taken = tier.take(engine.cache.swa.num_slots, ComponentType.SWA)
    assert len(taken) == engine.cache.swa.num_slots
    yield
    tier.recycle(taken, ComponentType.SWA)


def test_no_space_for_the_window_is_told(engine: Engine) -> None:
    """The other blocks are good and stay; the answer and a metric say what is missing."""
    metrics = engine.manager._backend.metrics
    before = metrics.no_space_blocks
    engine.compute(PROMPT, HERE, swa_blocks=HERE_SWA)
    task_id, mask = engine.manager.put_match(PROMPT)
    assert mask.all()
    with no_window_slots(engine):
        engine.manager.launch([task_id], [engine.slots(HERE)], [engine.slots(HERE_SWA)])
        response = engine.expect(task_id, KVResponseStatus.FAILED)
        assert "window" in response.error
        assert not response.return_mask.any()
    assert metrics.no_space_blocks - before == WINDOW
    assert not engine.manager.get_match(PROMPT, swa_aware=True)[1].any()
    assert engine.get(PROMPT, THERE) == 6 * BLOCK
    with no_window_slots(engine):  # now the window is all that is to be stored
        task_id, mask = engine.manager.put_match(PROMPT, swa_aware=True)
        assert not mask.any()
        engine.manager.launch([task_id], [engine.slots([])], [engine.slots(HERE_SWA)])
        assert "window" in engine.expect(task_id, KVResponseStatus.FAILED).error
    assert metrics.no_space_blocks - before == 2 * WINDOW
    assert put(engine, swa_aware=True) == 0
    assert engine.manager.get_match(PROMPT, swa_aware=True)[1].all()
    full = engine.manager._backend.tier.client.stats()["pool"]
    assert full["full"]["num_staged"] == full["swa"]["num_staged"] == 0


def test_no_space_for_a_window_of_a_batch_is_told(engine: Engine) -> None:
    prompts, places = [PROMPT, tokens_of(2 * BLOCK, 1)], [HERE, [20, 21]]
    for tokens, at in zip(prompts, places, strict=True):
        engine.compute(tokens, at)
    tasks = [engine.manager.put_match(tokens)[0] for tokens in prompts]
    with no_window_slots(engine):
        [batch] = engine.manager.launch(
            tasks, [engine.slots(at) for at in places], [engine.slots(HERE_SWA), None], as_batch=True
        )
        assert "window" in engine.expect(batch, KVResponseStatus.FAILED).error
    for tokens in prompts:
        task_id, mask = engine.manager.get_match(tokens)
        assert mask.all()
        engine.manager.cancel([task_id])


def test_a_single_id_comes_with_its_window(engine: Engine) -> None:
    engine.compute(PROMPT, HERE, swa_blocks=HERE_SWA)
    task_id, _ = engine.manager.put_match(PROMPT)
    engine.manager.launch(task_id, engine.slots(HERE), engine.slots(HERE_SWA))
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    task_id, _ = engine.manager.get_match(PROMPT, swa_aware=True)
    engine.manager.launch(task_id, engine.slots(THERE).tolist(), [engine.slots(THERE_SWA).tolist()])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.wrong_blocks(PROMPT, THERE, swa_blocks=THERE_SWA) == []


def test_under_pressure_every_joint_hit_is_right(engine: Engine) -> None:
    """More prompts than the pools hold; every hit is checked byte for byte."""
    hits = 0
    for turn in range(60):
        tokens = tokens_of(6 * BLOCK, 100 + turn % 9)
        put(engine, tokens, swa_aware=True) if turn % 2 else None
        task_id, mask = engine.manager.get_match(tokens, swa_aware=True)
        moved = int(mask.sum()) // BLOCK
        if moved:
            hits += 1
            window = THERE_SWA[: min(WINDOW, moved)]
            engine.manager.launch([task_id], [engine.slots(THERE[:moved])], [engine.slots(window)])
            engine.expect(task_id, KVResponseStatus.SUCCESS)
            assert engine.wrong_blocks(tokens[: moved * BLOCK], THERE[:moved], swa_blocks=window) == []
    assert hits > 10
