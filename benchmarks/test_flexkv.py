"""KVManager.get_match of a stored prompt, hashing included: p50, in this process and through a KVServer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.timing import p50_us, wait_until
from benchmarks.tree import SEED
from radixshmem import RadixServer, ServerConfig, hash_blocks

torch = pytest.importorskip("torch")

from flexkv_radix import (  # noqa: E402
    CacheConfig,
    KVCacheLayout,
    KVCacheLayoutType,
    KVManager,
    KVTPClient,
    ModelConfig,
)

BLOCK_TOKENS = 16
MAX_BLOCKS = 8192
ROUNDS = 2000
WAIT_S = 60.0

Tokens = NDArray[np.int64]


def make_tokens() -> Tokens:
    return np.random.default_rng(SEED).integers(0, 150_000, MAX_BLOCKS * BLOCK_TOKENS)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLEXKV_")}
    with patch.dict(os.environ, {**kept, **values}, clear=True):
        yield


@contextmanager
def manager_with_prompt(folder: Path, launch_mode: str) -> Iterator[KVManager]:
    """A KVManager whose cache holds all of make_tokens().  ``launch_mode``: of the KVServer, "" for none."""
    name = f"/bench-kv-{os.getpid()}-{launch_mode or 'alone'}"
    port = f"ipc://{folder}/kv"
    settings = {
        "FLEXKV_RADIXSHMEM_SERVER_NAME": name,
        "FLEXKV_SERVER_RECV_PORT": port,
        "FLEXKV_SERVER_LAUNCH_MODE": launch_mode,
    }
    model = ModelConfig(dtype="int16")  # 64 bytes a block: it is the match that is timed
    layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 1, MAX_BLOCKS, BLOCK_TOKENS, 1, 1)
    with ExitStack() as stack:
        stack.enter_context(RadixServer(ServerConfig(name=name, data_bytes=64 << 20, metrics_address="")))
        stack.enter_context(environment(settings))
        manager = KVManager(model, CacheConfig(BLOCK_TOKENS))
        stack.callback(manager.shutdown)
        manager.start()
        rank = KVTPClient(f"{port}_gpu_register", 0, 0)
        stack.callback(rank.close)
        rank.register_to_server([torch.zeros(layout.kv_shape[1:], dtype=torch.int16)], layout)
        wait_until(manager.is_ready, WAIT_S, "KVManager.is_ready()")
        task = manager.put_async(make_tokens(), np.arange(MAX_BLOCKS * BLOCK_TOKENS))
        manager.wait([task], WAIT_S)
        yield manager


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVManager]:
    with manager_with_prompt(tmp_path_factory.mktemp("kv"), "") as manager:
        yield manager


@pytest.fixture(scope="module")
def through_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVManager]:
    with manager_with_prompt(tmp_path_factory.mktemp("kv"), "embedded") as manager:
        yield manager


def time_get_match(benchmark: BenchmarkFixture, manager: KVManager, num_blocks: int) -> None:
    tokens = make_tokens()[: num_blocks * BLOCK_TOKENS]
    tasks: list[int] = []

    def drop_last() -> None:
        manager.cancel(tasks)
        manager.wait(tasks, WAIT_S)
        tasks.clear()

    def get_match() -> None:
        task, mask = manager.get_match(tokens)
        tasks.append(task)
        assert len(mask) == len(tokens)

    get_match()
    assert manager.get_match(tokens)[1].sum() == len(tokens)
    benchmark.pedantic(get_match, setup=drop_last, rounds=ROUNDS, warmup_rounds=50)
    drop_last()


@pytest.mark.parametrize(
    ("num_blocks", "target_us", "flexkv_us"), [(128, 25, 67), (1024, 40, 122), (8192, 250, 823)]
)
def test_get_match(
    benchmark: BenchmarkFixture, in_process: KVManager, num_blocks: int, target_us: float, flexkv_us: int
) -> None:
    time_get_match(benchmark, in_process, num_blocks)
    benchmark.extra_info.update(
        what=f"KVManager.get_match, {num_blocks} blocks of 16 tokens, in process, p50",
        target_us=target_us,
        limit=f"{hashing_us(num_blocks):.0f} us of hashing; FlexKV's own {flexkv_us} us",
    )


@pytest.mark.parametrize(
    ("num_blocks", "target_us", "flexkv_us"), [(128, 150, 369), (1024, 250, 630), (8192, 900, 2706)]
)
def test_get_match_through_server(
    benchmark: BenchmarkFixture, through_server: KVManager, num_blocks: int, target_us: float, flexkv_us: int
) -> None:
    time_get_match(benchmark, through_server, num_blocks)
    benchmark.extra_info.update(
        what=f"KVManager.get_match, {num_blocks} blocks of 16 tokens, through KVServer, p50",
        target_us=target_us,
        limit=f"{hashing_us(num_blocks):.0f} us of hashing; FlexKV's own {flexkv_us} us",
    )


def hashing_us(num_blocks: int) -> float:
    tokens = make_tokens()[: num_blocks * BLOCK_TOKENS]
    return p50_us(lambda: hash_blocks(tokens, BLOCK_TOKENS), 200)
