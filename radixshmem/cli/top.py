"""``radixctl top``: what moved since the last look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from radixshmem.cli.region_view import read_stats
from radixshmem.cli.tables import table
from radixshmem.geometry import POOL_NAMES


def watch(name: str, interval_s: float) -> Iterator[dict[str, Any]]:
    """Rates per second and pool levels, one dict every ``interval_s``, for ever."""
    before, then = read_stats(name), time.monotonic()
    while True:
        time.sleep(interval_s)
        after, now = read_stats(name), time.monotonic()
        yield _rates(before, after, now - then)
        before, then = after, now


def view(name: str, sample: dict[str, Any]) -> RenderableType:
    rows = [
        (
            pool["component"],
            pool["total"],
            pool["free"],
            pool["staged"],
            pool["published"],
            pool["hit_blocks"],
            pool["miss_blocks"],
            pool["inserted_blocks"],
            pool["evicted_blocks"],
        )
        for pool in sample["pools"]
    ]
    columns = ("pool", "total", "free", "staged", "published", "hit/s", "miss/s", "insert/s", "evict/s")
    head = f"{name}: {sample['clients']} clients, {sample['queries']:.1f} queries/s, {sample['pins']} pins"
    return Group(Text(head), table(columns, rows))


def _rates(before: dict[str, Any], after: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    return {
        "elapsed_s": round(elapsed_s, 3),
        "clients": after["num_clients"],
        "pins": sum(pool["num_pins"] for pool in after["pool"].values()),
        "queries": (after["queries"] - before["queries"]) / elapsed_s,
        "pools": [
            _pool_rates(before, after, component, elapsed_s)
            for component in POOL_NAMES.values()
            if after["pool"][component]["capacity"]
        ],
    }


def _pool_rates(
    before: dict[str, Any], after: dict[str, Any], component: str, elapsed_s: float
) -> dict[str, Any]:
    pool = after["pool"][component]
    rates = {
        field: (after[field][component] - before[field][component]) / elapsed_s
        for field in ("hit_blocks", "miss_blocks", "inserted_blocks")
    }
    evicted = sum(after["evicted_blocks"][component].values()) - sum(
        before["evicted_blocks"][component].values()
    )
    return {
        "component": component,
        "total": pool["capacity"],
        "free": pool["num_free"],
        "staged": pool["num_staged"],
        "published": pool["num_published"],
        **rates,
        "evicted_blocks": evicted / elapsed_s,
    }
