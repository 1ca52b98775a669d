"""The connector's counters in vLLM's log and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_HELP = {
    "lookups": "Requests looked up in the node's KV cache.",
    "lookup_tokens": "Tokens looked up, those in the engine's own cache left out.",
    "hit_tokens": "Tokens found.",
    "loads": "Loads that succeeded.",
    "loaded_tokens": "Tokens loaded.",
    "failed_loads": "Loads that failed; their tokens were computed.",
    "stores": "Stores that succeeded.",
    "stored_tokens": "Tokens stored.",
    "failed_stores": "Stores that failed.",
    "errors": "Errors of the cache that were answered as a miss.",
}


class RadixShmemStats(KVConnectorStats):  # type: ignore[misc]  # vLLM may not be installed
    """data: increments of the counters (connectors/counters.py) by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> RadixShmemStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class RadixShmemPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:radixshmem_<counter>_total`, per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        counter_type = metric_types[Counter]
        self._counters = {
            name: {engine: metric.labels(*values) for engine, values in per_engine.items()}
            for name, text in _HELP.items()
            for metric in (
                counter_type(f"vllm:radixshmem_{name}", documentation=text, labelnames=labelnames),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
