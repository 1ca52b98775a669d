"""An engine follows its radix-server to another region, whatever the moment."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path

import pytest
from daemon import Daemon, eventually
from engine import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERFIRST,
    SMALL_SLOT_BYTES,
    Engine,
    RankMemory,
    small_memory,
    small_model,
    tokens_of,
)
from engine_process import EngineProcess
from kv_server import EXTERNAL

from flexkv_radix import CacheConfig, KVCacheLayout, SWAPoolConfig
from radixshmem import Geometry, RadixClient

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
FLAGS = ("--data-bytes", str(64 * SMALL_SLOT_BYTES))


def num_attaches(name: str) -> int:
    """How often somebody attached to the region so far, this time included."""
    with RadixClient(name) as client:
        return client.index.incarnation


def test_a_store_that_vanishes_while_an_engine_attaches_again(shm_name: str, tmp_path: Path) -> None:
    """Again and again the engine finds the new index and not its SlotStore, until that is there."""
    store = Path(f"/dev/shm{shm_name}_data")
    aside = store.with_name(f"{store.name}.aside")
    with EngineProcess(shm_name, tmp_path) as engine:
        with Daemon(shm_name, *FLAGS) as first:
            engine.ask("ready")
            assert first.stop() == 0
        eventually(lambda: "retired" in engine.ask("disabled"), "the end of the server")
        os.kill(engine.pid, signal.SIGSTOP)
        with Daemon(shm_name, *FLAGS) as second:
            second.wait_serving()
            with RadixClient(shm_name, Geometry(BLOCK, SMALL_SLOT_BYTES, slot_align=1024)) as client:
                client.wait_ready(30)
            store.rename(aside)
            before = num_attaches(shm_name)
            os.kill(engine.pid, signal.SIGCONT)
            looks = itertools.count(1)
            eventually(lambda: num_attaches(shm_name) > before + next(looks), "a try of the engine")
            assert engine.ask("put", PROMPT, HERE) == 0
            aside.rename(store)
            eventually(lambda: engine.ask("disabled") == "", lambda: str(engine.ask("disabled")))
            assert engine.ask("put", PROMPT, HERE) == engine.ask("get", PROMPT, THERE) == 5 * BLOCK


@pytest.mark.parametrize("environ", [{}, EXTERNAL], ids=["in process", "KVServer"])
def test_counts_are_those_of_the_region_in_use(
    shm_name: str, tmp_path: Path, server: subprocess.Popen[bytes], environ: dict[str, str]
) -> None:
    window = SWAPoolConfig(2 * BLOCK, num_layers=1, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype="int16")
    cache = CacheConfig(BLOCK, swa=window)
    swa = RankMemory(KVCacheLayout(LAYERFIRST, 1, 64, BLOCK, HEADS, HEAD_SIZE), 1)
    with Engine(
        shm_name, tmp_path, small_model(), cache, [[small_memory()]], swa=[swa], environ=environ
    ) as engine:
        for num_bytes in (64 << 10, 128 << 10, 96 << 10):
            flags = ("--data-bytes", str(num_bytes), "--swa-ratio", "0.5")
            with Daemon(shm_name, *flags) as daemon:
                engine.wait_ready()
                eventually(lambda: not engine.manager.disabled, lambda: engine.manager.disabled)
                engine.manager.get_match(PROMPT)
                with RadixClient(shm_name) as client:
                    theirs = client.mempool_total(), client.swa_mempool_total()
                assert (cache.num_cpu_blocks, window.num_slots) == theirs
                assert daemon.stop() == 0
            eventually(lambda: "retired" in engine.manager.disabled, "the end of the region")
