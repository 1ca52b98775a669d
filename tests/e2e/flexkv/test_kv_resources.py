"""What tasks hold comes back once, whatever is in the way: a locked index, a worker that died."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, small_engine, tokens_of
from frozen import frozen_index
from node import Node
from stopping import stopped

from flexkv_radix import KVResponseStatus, hash_tokens
from flexkv_radix.tier import CacheEngineRadixShmem, StagedRadixInsert
from radixshmem import Geometry, RadixClient

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
NUM_SLOTS = 12
ENDS = {"publish": StagedRadixInsert.publish, "abort": StagedRadixInsert.abort}


def held(client: RadixClient) -> tuple[int, int]:
    """(pins, staged slots) of the whole region."""
    full = client.stats()["pool"]["full"]
    return full["num_pins"], full["num_staged"]


def client_of(engine: Engine) -> RadixClient:
    client: RadixClient = engine.manager._backend.tier.client
    return client


# -- a staged insert ends by exactly one of publish | abort


@pytest.fixture
def tier(node: Node) -> CacheEngineRadixShmem:
    name = node.serve(data_bytes=NUM_SLOTS * 1024)
    return CacheEngineRadixShmem(node.join(name, Geometry(BLOCK, 1024, slot_align=1024)))


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ENDS, ENDS)))
def test_a_staged_insert_ends_once(tier: CacheEngineRadixShmem, first: str, second: str) -> None:
    hashes = hash_tokens(PROMPT, BLOCK)
    staged = tier.stage(hashes, 0, tier.take(5))
    ENDS[first](staged)
    others = tier.take(5)  # slots that came back are somebody else's now
    with pytest.raises(RuntimeError, match="twice"):
        ENDS[second](staged)
    assert held(tier.client) == (0, 5)
    assert tier.num_present(hashes) == (5 if first == "publish" else 0)
    tier.recycle(others)
    assert held(tier.client) == (0, 0)


def test_of_two_threads_one_ends_a_staged_insert(tier: CacheEngineRadixShmem) -> None:
    hashes = hash_tokens(PROMPT, BLOCK)
    barrier = threading.Barrier(2)

    def end(staged: StagedRadixInsert, how: Callable[[StagedRadixInsert], object]) -> bool:
        barrier.wait(20)
        try:
            how(staged)
        except RuntimeError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        for _ in range(100):
            staged = tier.stage(hashes, 0, tier.take(5))
            ended = list(pool.map(end, [staged] * 2, ENDS.values()))
            assert sorted(ended) == [False, True]
            assert tier.num_present(hashes) == (5 if ended[0] else 0)
            assert held(tier.client) == (0, 0)
            tier.client.reset()


# -- an index whose lock is held by one that makes no progress


def finish_store(engine: Engine) -> tuple[int, int]:
    """Compute and launch PROMPT; (its task, lock timeouts before the transfer can be over)."""
    engine.compute(PROMPT, HERE)
    task_id, _ = engine.manager.put_match(PROMPT)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    return task_id, client_of(engine).stats()["lock_timeouts"]


def test_a_store_waits_for_the_lock(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        client = client_of(engine)
        with stopped(engine.manager._backend._driver.worker.pid) as go_on:
            task_id, before = finish_store(engine)
            with frozen_index(name):
                go_on()
                eventually(lambda: client.stats()["lock_timeouts"] > before, "a publish")
        engine.expect(task_id, KVResponseStatus.SUCCESS)
        assert held(client) == (0, 0)
        assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_a_store_gives_up_when_the_lock_does_not_come(node: Node, tmp_path: Path) -> None:
    """FAILED with the cause; the slots come back with the lock, and the next store finds them."""
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        with stopped(engine.manager._backend._driver.worker.pid) as go_on:
            task_id, _ = finish_store(engine)
            with frozen_index(name):
                go_on()
                assert "locked" in engine.expect(task_id, KVResponseStatus.FAILED).error
        eventually(lambda: held(client_of(engine)) == (0, 0), "the slots")
        long = tokens_of(NUM_SLOTS * BLOCK, 1)
        assert engine.put(long, range(NUM_SLOTS)) == NUM_SLOTS * BLOCK


# -- a worker that died


def test_slots_of_a_lost_worker_stay_aside_for_a_moment(node: Node, tmp_path: Path) -> None:
    """A device may still write what its dead process began: pins come back at once, slots 2 s later."""
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        client = client_of(engine)
        engine.put(tokens_of(BLOCK, 1), [40])
        matched, _ = engine.manager.get_match(tokens_of(BLOCK, 1))
        worker = engine.manager._backend._driver.worker.pid
        with stopped(worker):
            running, _ = finish_store(engine)
            assert held(client) == (1, 5)
            start_s = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            engine.expect(running, KVResponseStatus.FAILED)
            engine.expect(matched, KVResponseStatus.FAILED)
            assert held(client) == (0, 5)
        eventually(lambda: held(client) == (0, 0), "the end of the quarantine")
        assert time.monotonic() - start_s > 2.0
        eventually(lambda: not engine.manager.disabled, "another worker")
        assert engine.get(PROMPT, THERE) == 0
        assert engine.put(tokens_of(NUM_SLOTS * BLOCK, 2), range(NUM_SLOTS)) == NUM_SLOTS * BLOCK
