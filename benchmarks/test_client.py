"""Times of single calls from Python: p50 over thousands of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.timing import p50_us
from benchmarks.tree import LONG_BLOCKS, SEED, Hashes, filled_index, new_hashes
from examples.demo.processes import Server, sweep
from radixshmem import Geometry, RadixClient, hash_blocks

ROUNDS = 3000

Filled = tuple[RadixClient, list[Hashes], Hashes]


@pytest.fixture(scope="module")
def filled() -> Iterator[Filled]:
    with filled_index() as index:
        yield index


def match_and_release(client: RadixClient, hashes: Hashes) -> int:
    result = client.query(hashes, lock=True)
    hit = result.common_hit
    result.finalize()  # type: ignore[misc]
    return hit


@pytest.mark.parametrize(("num_blocks", "target_us"), [(128, 6), (1024, 10), (8192, 40)])
def test_query_lock_finalize(
    benchmark: BenchmarkFixture, filled: Filled, num_blocks: int, target_us: float
) -> None:
    client, paths, long_path = filled
    asked = [long_path] if num_blocks == LONG_BLOCKS else [path[:num_blocks].copy() for path in paths]
    assert all(match_and_release(client, hashes) == num_blocks for hashes in asked)
    unknown = new_hashes(np.random.default_rng(SEED + 2), num_blocks)
    miss_us = p50_us(lambda: match_and_release(client, unknown), ROUNDS)
    copy_us = p50_us(lambda: asked[0].astype(np.int32), ROUNDS)
    turn = itertools.cycle(asked)
    benchmark.extra_info.update(
        what=f"client.query(lock=True) + finalize, {num_blocks} blocks, p50",
        target_us=target_us,
        limit=f"{miss_us + copy_us:.1f} us: a miss ({miss_us:.1f}) and converting the hashes ({copy_us:.1f})",
    )
    benchmark.pedantic(
        match_and_release, setup=lambda: ((client, next(turn)), {}), rounds=ROUNDS, warmup_rounds=100
    )


def test_insert_path(benchmark: BenchmarkFixture, filled: Filled) -> None:
    client, _, _ = filled
    num_blocks = 1024
    rng = np.random.default_rng(SEED + 3)

    def insert_setup() -> tuple[tuple[Hashes, object], dict[str, object]]:
        return (new_hashes(rng, num_blocks), client.allocate_slots(num_blocks)), {}

    benchmark.extra_info.update(
        what=f"client.insert, new path of {num_blocks} blocks, p50 (evicting kept out of the clock)",
        limit=f"{2 + 0.015 * num_blocks:.1f} us is the target in C: 2 us + 15 ns a block",
    )
    benchmark.pedantic(client.insert, setup=insert_setup, rounds=1000, warmup_rounds=100)


def test_hash_blocks(benchmark: BenchmarkFixture) -> None:
    num_tokens = 1 << 17
    tokens = np.random.default_rng(SEED).integers(0, 150_000, num_tokens)
    one_hash_us = p50_us(lambda: xxhash.xxh64_intdigest(tokens), rounds=1000)
    benchmark.extra_info.update(
        what="hash_blocks, 16 tokens a block",
        at_least_per_s=1.0,
        unit="G tokens/s",
        amount=num_tokens / 1e9,
        limit=f"{num_tokens / one_hash_us / 1e3:.2f} G tokens/s: XXH64 of all with one digest at the end",
    )
    benchmark.pedantic(hash_blocks, args=(tokens, 16), rounds=1000, warmup_rounds=10)


def test_attach(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    name = f"/bench-attach-{SEED}"
    server = Server(name, "1G", tmp_path / "log")
    geometry = Geometry(16, full_slot_bytes=1 << 20, fingerprint="attach benchmark")
    try:
        server.wait_listening()
        with RadixClient(name, geometry) as first:
            first.wait_ready()
            rpc_us = p50_us(first.status, rounds=200)
        mapped_s: list[float] = []

        def attach() -> None:
            with RadixClient(name, geometry) as client:
                client.wait_ready()
                client.mempool_free()
                start = time.perf_counter()
                _ = client.store
                mapped_s.append(time.perf_counter() - start)

        benchmark.pedantic(attach, rounds=300, warmup_rounds=5)
        benchmark.extra_info.update(
            what="attach to a ready server and leave: connect, geometry, index, 1 GiB SlotStore; p50",
            target_us=20e3,
            limit=f"{rpc_us:.0f} us a control request; the mapping takes {np.median(mapped_s) * 1e6:.0f} us",
        )
    finally:
        server.stop()
        sweep(name)
