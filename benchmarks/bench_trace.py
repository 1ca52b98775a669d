"""Hit rates on a public trace of requests, against an exact LRU of the same capacity.

    python -m benchmarks.bench_trace [TRACE]     (or RADIX_TRACE=path)

TRACE is in Mooncake's format (see examples/replay_trace.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.row import SKIPPED, Row, emit
from examples.replay_trace import exact_lru, read_trace, replay
from radixshmem.config import EVICT_POLICIES

CAPACITIES = (10_000, 30_000, 100_000)
MAX_POINTS_OFF = 0.5


def compare(requests: Sequence[Sequence[int]], capacity: int, policy: str) -> Row:
    """Replay under ``policy`` and put the exact LRU beside it."""
    start = time.perf_counter()
    ours = replay(requests, capacity, policy)
    elapsed_s = time.perf_counter() - start
    exact, ceiling = exact_lru(requests, capacity), exact_lru(requests, sys.maxsize)
    is_lru = policy == "lru"
    return Row(
        what=f"hit rate of the trace, {capacity} blocks, {policy}",
        measured=f"{ours.hit_rate:.2f} % ({len(requests) / elapsed_s:.0f} requests/s)",
        target=f"{exact.hit_rate:.2f} % +- {MAX_POINTS_OFF} (exact LRU)" if is_lru else "",
        limit=f"{ceiling.hit_rate:.2f} % with room for all; exact LRU {exact.hit_rate:.2f} %",
        met=abs(ours.hit_rate - exact.hit_rate) <= MAX_POINTS_OFF if is_lru else None,
        value=ours.hit_rate,
    )


def main() -> int:
    """Emit a row for each policy and capacity."""
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("RADIX_TRACE", "")
    if not path:
        print("hit rate of a trace: give its path, make bench TRACE=path", file=sys.stderr)
        return SKIPPED
    requests = read_trace(Path(path))
    for policy in EVICT_POLICIES:
        for capacity in CAPACITIES:
            emit(compare(requests, capacity, policy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
