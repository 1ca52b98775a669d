"""Prometheus metrics, read from the region's own counters at each scrape.

The region counts what clients do, so the numbers go on over a server's death and adoption.  Every
metric with every label value is there from the first scrape on, at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from radixshmem.geometry import POOL_NAMES
from radixshmem.info import ServerInfo
from radixshmem.records import EventReason

COMPONENTS = tuple(POOL_NAMES.values())
SLOT_STATES = ("free", "staged", "published")
EVICT_REASONS = tuple(reason.name.lower() for reason in EventReason if reason is not EventReason.NONE)
ALLOCATE_FAILURES = {"full": "allocate_short", "busy": "allocate_busy"}  # reason: field of the stats
PULL_OUTCOMES = ("hit", "partial", "miss", "timeout", "failed", "cancelled")

Stats = Mapping[str, Any]
"""``stats.name_stats``; empty while there is no region."""

_PLAIN_COUNTERS = {  # metric: (field of the stats, help)
    "radix_reaped_clients": ("reaped_clients", "Dead clients whose lease was given back."),
    "radix_reaped_pins": ("reaped_pins", "Pins given back for dead clients."),
    "radix_reaped_slots": ("reaped_slots", "Staged slots given back for dead clients."),
    "radix_lock_recoveries": (
        "lock_recoveries",
        "Times an unfinished change was undone after its owner's death.",
    ),
    "radix_stale_handles": ("stale_releases", "Releases of pins that were not held any more."),
    "radix_lock_timeouts": ("lock_timeouts", "Acquisitions of the index lock that passed their deadline."),
}


class RegionCollector(Collector):
    """Turns the region's counters and the server's state into metrics."""

    def __init__(
        self,
        read_stats: Callable[[], Stats],
        read_info: Callable[[], ServerInfo],
        read_local: Callable[[], Mapping[str, float]],
    ) -> None:
        """``read_local``: ``prefault_seconds`` and ``unfingerprinted`` as the server counts them."""
        self._read_stats = read_stats
        self._read_info = read_info
        self._read_local = read_local

    def collect(self) -> Iterable[Metric]:
        stats, info, local = self._read_stats(), self._read_info(), self._read_local()
        yield from _pool_metrics(stats)
        yield from _flow_metrics(stats)
        for name, (field, text) in _PLAIN_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=stats.get(field, 0))
        yield from _pull_metrics()
        yield from _server_metrics(stats, info, local)


def build_registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _pool_metrics(stats: Stats) -> Iterable[Metric]:
    slots = GaugeMetricFamily("radix_slots", "Slots by state.", labels=["component", "state"])
    for component in COMPONENTS:
        pool = stats["pool"][component] if stats else {}
        for state in SLOT_STATES:
            slots.add_metric([component, state], pool.get(f"num_{state}", 0))
    yield slots


def _flow_metrics(stats: Stats) -> Iterable[Metric]:
    matched = CounterMetricFamily(
        "radix_match_blocks", "Blocks that queries asked for.", labels=["component", "result"]
    )
    evicted = CounterMetricFamily(
        "radix_evicted_blocks", "Blocks that left the tree.", labels=["component", "reason"]
    )
    failed = CounterMetricFamily(
        "radix_allocate_failures",
        "Allocations that came back short or empty.",
        labels=["component", "reason"],
    )
    for component in COMPONENTS:
        for result in ("hit", "miss"):
            matched.add_metric([component, result], _count(stats, f"{result}_blocks", component))
        counts = stats["evicted_blocks"][component] if stats else {}
        for reason in EVICT_REASONS:
            evicted.add_metric([component, reason], counts.get(reason, 0))
        for reason, field in ALLOCATE_FAILURES.items():
            failed.add_metric([component, reason], _count(stats, field, component))
    yield matched
    yield CounterMetricFamily(
        "radix_inserted_blocks", "Blocks published.", value=_count(stats, "inserted_blocks", "full")
    )
    yield evicted
    yield failed


def _pull_metrics() -> Iterable[Metric]:
    """A single node pulls nothing; the metrics are there for dashboards."""
    jobs = CounterMetricFamily("radix_pull_jobs", "Pull jobs that ended.", labels=["outcome"])
    for outcome in PULL_OUTCOMES:
        jobs.add_metric([outcome], 0)
    yield jobs
    yield CounterMetricFamily("radix_pull_bytes", "Bytes pulled from other nodes.", value=0)


def _server_metrics(stats: Stats, info: ServerInfo, local: Mapping[str, float]) -> Iterable[Metric]:
    dropped = (
        max(0, stats["event_head"] - stats["event_capacity"]) if stats and stats["event_capacity"] else 0
    )
    yield CounterMetricFamily("radix_events_dropped", "Events that newer ones overwrote.", value=dropped)
    # The server's own entry in the client table is no client.
    yield GaugeMetricFamily(
        "radix_clients", "Attached clients.", value=max(0, stats.get("num_clients", 0) - 1)
    )
    yield GaugeMetricFamily(
        "radix_prefault_seconds",
        "Time that making and prefaulting the regions took.",
        local["prefault_seconds"],
    )
    yield CounterMetricFamily(
        "radix_unfingerprinted_configures",
        "Geometries accepted without a fingerprint.",
        value=local["unfingerprinted"],
    )
    labels = {"name": info.name, "version": info.version, "epoch": info.epoch, "mode": info.mode}
    yield InfoMetricFamily("radix", "The server.", value=labels)


def _count(stats: Stats, field: str, component: str) -> int:
    return int(stats[field][component]) if stats else 0
