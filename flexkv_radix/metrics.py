"""FlexKV's own metrics, `flexkv_py_*`: counted always, served when FLEXKV_ENABLE_METRICS=1.

Counting is adding to plain integers under the task engine's lock, so that it costs a match nothing; the
names, types and labels are made when Prometheus asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flexkv_radix.lifecycle import TaskKind, TaskState
from flexkv_radix.transfer.protocol import OpKind
from radixshmem import ComponentType

logger = logging.getLogger(__name__)

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LABEL = "dp_client_id"


@dataclass
class NodeCounts:
    """What the region itself counts, for all engines of the node."""

    total: dict[ComponentType, int] = field(default_factory=dict)  # slots
    free: dict[ComponentType, int] = field(default_factory=dict)
    evicted_blocks: int = 0


@dataclass(eq=False)  # a registry tells collectors apart by identity
class Metrics:
    """Counters of one task engine.

    Transfer durations: wait from launch to the worker's start, xfer the moving itself, e2e from launch to
    published or readable.
    """

    dp_client_id: int = 0
    hit_blocks: int = 0
    miss_blocks: int = 0
    allocated_blocks: int = 0
    no_space_blocks: int = 0  # blocks that a put could not get slots for
    match_errors: int = 0  # matches answered as a miss because of an error
    is_disabled: int = 0
    tasks: dict[tuple[TaskKind, TaskState], int] = field(default_factory=dict)
    ops: dict[tuple[OpKind, ComponentType], int] = field(default_factory=dict)
    blocks: dict[tuple[OpKind, ComponentType], int] = field(default_factory=dict)
    bytes: dict[tuple[OpKind, ComponentType], int] = field(default_factory=dict)
    node: Callable[[], NodeCounts] = NodeCounts  # asked at each scrape

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self._durations = {
            name: Histogram(
                f"flexkv_py_transfer_{name}_duration_seconds", text, [_LABEL, "direction"],
                buckets=_SECONDS, registry=self.registry,
            )
            for name, text in (
                ("wait", "From launch to the start of the transfer"),
                ("xfer", "Moving the bytes"),
                ("e2e", "From launch to the end of the transfer"),
            )
        }  # fmt: skip
        for histogram in self._durations.values():
            for kind in OpKind:
                histogram.labels(self.dp_client_id, kind.name.lower())
        for task_kind in TaskKind:
            for state in (TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED):
                self.tasks[task_kind, state] = 0
        for op_kind in OpKind:
            for component in (ComponentType.FULL, ComponentType.SWA):
                for counts in (self.ops, self.blocks, self.bytes):
                    counts[op_kind, component] = 0
        self.registry.register(self)

    def transferred(
        self,
        kind: OpKind,
        component: ComponentType,
        num_blocks: int,
        num_bytes: int,
        times_ns: tuple[int, int, int, int],
    ) -> None:
        """Count one transfer; times_ns: launched, started, finished, seen, all monotonic."""
        self.ops[kind, component] += 1
        self.blocks[kind, component] += num_blocks
        self.bytes[kind, component] += num_bytes
        launched, started, finished, seen = times_ns
        for name, span_ns in (
            ("wait", started - launched),
            ("xfer", finished - started),
            ("e2e", seen - launched),
        ):
            self._durations[name].labels(self.dp_client_id, kind.name.lower()).observe(max(0, span_ns) / 1e9)

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus for each scrape."""
        node = self.node()
        plain = {
            "cache_hit_blocks": ("Blocks that matches found", self.hit_blocks),
            "cache_miss_blocks": ("Blocks that matches asked for and did not find", self.miss_blocks),
            "cache_allocated_blocks": ("Slots taken for stores", self.allocated_blocks),
            "cache_evicted_blocks": ("Blocks evicted on this node, whoever stored them", node.evicted_blocks),
            "cache_no_space_blocks": ("Blocks not stored because no slot could be had", self.no_space_blocks),
            "match_errors": ("Matches answered as a miss because of an error", self.match_errors),
        }
        for name, (text, value) in plain.items():
            family = CounterMetricFamily(f"flexkv_py_{name}", text, labels=[_LABEL])
            family.add_metric([str(self.dp_client_id)], value)
            yield family
        disabled = GaugeMetricFamily(
            "flexkv_py_cache_disabled", "1: this engine runs without the cache", labels=[_LABEL]
        )
        disabled.add_metric([str(self.dp_client_id)], self.is_disabled)
        yield disabled
        yield self._tasks_family()
        yield from self._transfer_families()
        yield from self._pool_families(node)

    def _tasks_family(self) -> Metric:
        family = CounterMetricFamily("flexkv_py_tasks", "Tasks that ended", labels=[_LABEL, "kind", "state"])
        for (kind, state), value in self.tasks.items():
            family.add_metric([str(self.dp_client_id), kind.name.lower(), state.name.lower()], value)
        return family

    def _transfer_families(self) -> Iterator[Metric]:
        labels = [_LABEL, "direction", "component"]
        for name, text, counts in (
            ("ops", "Transfers", self.ops),
            ("blocks", "Blocks moved", self.blocks),
            ("bytes", "Bytes moved", self.bytes),
        ):  # fmt: skip
            family = CounterMetricFamily(f"flexkv_py_transfer_{name}", text, labels=labels)
            for (kind, component), value in counts.items():
                family.add_metric([str(self.dp_client_id), kind.name.lower(), component.name.lower()], value)
            yield family

    def _pool_families(self, node: NodeCounts) -> Iterator[Metric]:
        for name, text, counts in (
            ("total", "Slots of the pool", node.total),
            ("free", "Slots neither staged nor published", node.free),
        ):
            family = GaugeMetricFamily(f"flexkv_py_mempool_{name}_blocks", text, labels=[_LABEL, "component"])
            for component, value in counts.items():
                family.add_metric([str(self.dp_client_id), component.name.lower()], value)
            yield family


class MetricsEndpoint:
    """Serves the metrics of several engines on 127.0.0.1; one warning if the port is taken."""

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._close: Callable[[], None] | None = None
        try:
            server, thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            logger.warning("no metrics: cannot serve on 127.0.0.1:%d (FLEXKV_METRICS_PORT): %s", port, error)
            return
        self.port = server.server_port

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._close = close

    def add(self, metrics: Metrics) -> None:
        """Serve metrics as well."""
        self._registry.register(metrics.registry)

    def remove(self, metrics: Metrics) -> None:
        """Serve metrics no more."""
        self._registry.unregister(metrics.registry)

    def close(self) -> None:
        """Stop serving."""
        if self._close is not None:
            self._close()
