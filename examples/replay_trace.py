"""Replay a trace of requests and tell how many of their blocks the cache would have had.

    python examples/replay_trace.py [TRACE] [--capacity BLOCKS ...] [--policy lru|lfu|slru|fifo ...]

TRACE has one JSON object a line, as Mooncake publishes its traces: ``timestamp`` (ms),
``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one number a block of 512 tokens of the
input).  Without one, the small sample beside this file is replayed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixshmem import Geometry, RadixClient, RadixServer, ServerConfig, hash_blocks

SAMPLE = Path(__file__).with_name("sample_trace.jsonl")
BLOCK_TOKENS = 512


class Replay(NamedTuple):
    """Blocks that were asked for, and of these, blocks that were there."""

    num_blocks: int
    num_hits: int

    @property
    def hit_rate(self) -> float:
        """In percent."""
        return 100 * self.num_hits / max(self.num_blocks, 1)


def read_trace(path: Path) -> list[list[int]]:
    """The ``hash_ids`` of every request, in order."""
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines if line.strip()]


def replay(requests: Sequence[Sequence[int]], num_slots: int, policy: str = "lru") -> Replay:
    """Send ``requests`` through a new index of ``num_slots`` blocks that evicts by ``policy``."""
    name = f"/replay-{os.getpid()}-{policy}-{num_slots}"
    config = ServerConfig(name=name, evict_policy=policy, metrics_address="", kvevent_ring_capacity=0)
    geometry = Geometry(BLOCK_TOKENS, full_slot_bytes=1, full_slots=num_slots, fingerprint="hashes only")
    num_blocks = num_hits = 0
    with RadixServer(config), RadixClient(name, geometry) as client:  # no data_bytes: an index only
        client.wait_ready()
        for ids in requests:
            # An id stands for a block and all before it; chained hashes of them do so in any trace.
            hashes = hash_blocks(np.array(ids, np.int64), 1)
            num_blocks += len(hashes)
            num_hits += serve(client, hashes)
    return Replay(num_blocks, num_hits)


def serve(client: RadixClient, hashes: NDArray[np.uint64]) -> int:
    """What an engine does for one prompt: use the known prefix, publish the rest.  Returns the hit."""
    with client.query(hashes, lock=True) as match:
        slots = client.allocate_slots(len(hashes) - match.common_hit)
        client.insert(hashes[: match.common_hit + len(slots)], slots, start=match.common_hit)
    return match.common_hit


def exact_lru(requests: Sequence[Sequence[int]], num_slots: int) -> Replay:
    """The same on a plain list of blocks by last use; of one request's blocks the last counts as oldest."""
    by_use: OrderedDict[int, None] = OrderedDict()
    num_blocks = num_hits = 0
    for ids in requests:
        num_blocks += len(ids)
        num_hits += next((i for i, block in enumerate(ids) if block not in by_use), len(ids))
        for block in reversed(ids):
            by_use[block] = None
            by_use.move_to_end(block)
        while len(by_use) > num_slots:
            by_use.popitem(last=False)
    return Replay(num_blocks, num_hits)


def main() -> None:
    """Replay and print a line for each policy and capacity."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("trace", nargs="?", type=Path, default=SAMPLE)
    parser.add_argument("--capacity", type=int, nargs="+", default=[50, 100, 400], metavar="BLOCKS")
    parser.add_argument("--policy", nargs="+", default=["lru"], choices=["lru", "lfu", "slru", "fifo"])
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        parser.error(f"{arguments.trace} is not a file")
    requests = read_trace(arguments.trace)
    num_distinct = len({block for ids in requests for block in ids})
    print(
        f"{arguments.trace.name}: {len(requests)} requests, {sum(map(len, requests))} blocks, "
        f"{num_distinct} of them distinct"
    )
    for capacity in arguments.capacity:
        results = {policy: replay(requests, capacity, policy) for policy in arguments.policy}
        for policy, result in {**results, "exact LRU": exact_lru(requests, capacity)}.items():
            print(f"{capacity:>8} blocks, {policy:<9}: {result.num_hits} hits, {result.hit_rate:.1f} %")


if __name__ == "__main__":
    main()
