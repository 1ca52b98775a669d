"""Two engines and several threads on a cache that is much too small: never a wrong byte.

`make pressure SECONDS=60` runs it for longer.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import numpy as np
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, small_engine, tokens_of
from node import Node

from flexkv_radix import KVResponseStatus

SECONDS = float(os.environ.get("RADIX_PRESSURE_S", "6"))
SEED = 20
NUM_THREADS = 3
BLOCKS_EACH = 8
TERMINAL = (KVResponseStatus.SUCCESS, KVResponseStatus.CANCELLED, KVResponseStatus.FAILED)


class Load:
    """One thread's requests, in engine blocks of its own."""

    def __init__(self, engine: Engine, thread: int) -> None:
        self.engine = engine
        self.blocks = list(range(thread * 2 * BLOCKS_EACH, (thread + 1) * 2 * BLOCKS_EACH))
        self.random = random.Random(SEED * 100 + thread)
        self.hits = self.puts = 0

    def run_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            self.one_request()

    def one_request(self) -> None:
        """A prompt of two parts, so that prompts share prefixes of different lengths."""
        shared, own = self.random.randrange(4), self.random.randrange(6)
        tokens = np.concatenate(
            [tokens_of(self.random.randrange(5) * BLOCK, shared), tokens_of(3 * BLOCK, 50 + own)]
        )
        if self.random.random() < 0.5:
            self._put(tokens)
        else:
            self._get(tokens)

    def _put(self, tokens: np.ndarray) -> None:
        at = self.blocks[: len(tokens) // BLOCK]
        self.engine.compute(tokens, at)
        task_id, mask = self.engine.manager.put_match(tokens)
        moved = self.engine.moved(mask, at)
        if moved:
            self.engine.manager.launch([task_id], [self.engine.slots(moved)])
        if self.random.random() < 0.1:
            self.engine.manager.cancel([task_id])
        response = self.engine.manager.wait([task_id])[task_id]
        assert response.status in TERMINAL, response
        self.puts += response.status is KVResponseStatus.SUCCESS

    def _get(self, tokens: np.ndarray) -> None:
        at = self.blocks[BLOCKS_EACH : BLOCKS_EACH + len(tokens) // BLOCK]
        task_id, mask = self.engine.manager.get_match(tokens)
        moved = self.engine.moved(mask, at)
        if moved:
            self.engine.manager.launch([task_id], [self.engine.slots(moved)])
        response = self.engine.manager.wait([task_id])[task_id]
        assert response.status is KVResponseStatus.SUCCESS, response
        assert self.engine.wrong_blocks(tokens, moved) == []
        self.hits += bool(moved)


def test_never_a_wrong_byte(node: Node, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    name = node.serve(data_bytes=20 * SMALL_SLOT_BYTES)
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
    num_block = NUM_THREADS * 2 * BLOCKS_EACH
    with (
        small_engine(name, tmp_path / "a", num_block).wait_ready() as a,
        small_engine(name, tmp_path / "b", num_block).wait_ready() as b,
    ):
        loads = [Load(engine, thread) for engine in (a, b) for thread in range(NUM_THREADS)]
        errors: list[BaseException] = []
        end_s = time.monotonic() + SECONDS

        def guarded(load: Load) -> None:
            try:
                load.run_until(end_s)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=guarded, args=(load,)) for load in loads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 60)
        assert not errors
        client = a.manager._backend.tier.client
        stats = client.stats()
        print(f"{sum(load.puts for load in loads)} stores, {sum(load.hits for load in loads)} hits")
        assert sum(stats["evicted_blocks"]["full"].values()) > 100
        assert min(load.hits for load in loads) > 0
        assert (stats["pool"]["full"]["num_pins"], stats["pool"]["full"]["num_staged"]) == (0, 0)
