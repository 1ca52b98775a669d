"""The index that the speed benchmarks run on: 2000-block paths that share their first 1000 blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from radixshmem import Geometry, RadixClient, RadixServer, ServerConfig

SEED = 11
PATH_BLOCKS, SHARED_BLOCKS = 2000, 1000
TREE_BLOCKS = 100_000
LONG_BLOCKS = 8192
SPARE_SLOTS = 32_768

Hashes = NDArray[np.uint64]


def make_paths(num_blocks: int = TREE_BLOCKS) -> list[Hashes]:
    """Hash paths that make a tree of ``num_blocks`` blocks.  Random hashes are as good as real ones."""
    rng = np.random.default_rng(SEED)
    shared = new_hashes(rng, SHARED_BLOCKS)
    own_blocks = PATH_BLOCKS - SHARED_BLOCKS
    num_paths = (num_blocks - SHARED_BLOCKS) // own_blocks
    return [np.concatenate([shared, new_hashes(rng, own_blocks)]) for _ in range(num_paths)]


def new_hashes(rng: np.random.Generator, num: int) -> Hashes:
    """Hashes that no other call of the same ``rng`` returned."""
    return rng.integers(1, 2**64 - 1, num, np.uint64)


def publish(client: RadixClient, path: Hashes) -> None:
    """Insert what is missing of ``path``."""
    known = client.query(path).common_hit
    slots = client.allocate_slots(len(path) - known)
    client.insert(path[: known + len(slots)], slots, start=known)


@contextmanager
def index_only(num_slots: int, *, events: int = 65536) -> Iterator[str]:
    """Name of a server in this process whose index has ``num_slots`` slots and no bytes behind them."""
    name = f"/bench-{os.getpid()}"
    config = ServerConfig(name=name, metrics_address="", kvevent_ring_capacity=events)
    geometry = Geometry(16, full_slot_bytes=1, full_slots=num_slots, fingerprint="hashes only")
    with RadixServer(config):
        with RadixClient(name, geometry, label="setup") as client:
            client.wait_ready()
        yield name


@contextmanager
def filled_index() -> Iterator[tuple[RadixClient, list[Hashes], Hashes]]:
    """(client, the tree's paths, a path of its own with LONG_BLOCKS blocks), all published."""
    paths = make_paths()
    long_path = new_hashes(np.random.default_rng(SEED + 1), LONG_BLOCKS)
    with index_only(TREE_BLOCKS + LONG_BLOCKS + SPARE_SLOTS) as name, RadixClient(name) as client:
        for path in [*paths, long_path]:
            publish(client, path)
        yield client, paths, long_path
