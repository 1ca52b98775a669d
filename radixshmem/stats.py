"""The core's counters under the names that people read."""

from __future__ import annotations

from typing import Any

from radixshmem.geometry import POOL_NAMES
from radixshmem.records import EventReason

_COMPONENTS = tuple(POOL_NAMES.values())


def name_stats(raw: dict[str, Any]) -> dict[str, Any]:
    """``Index.stats`` with every per-component list turned into a dict by pool name.

    ``pool`` has one dict of slot counts a component, ``evicted_blocks`` one of counts by reason.
    """
    named = {key: _by_component(value) for key, value in raw.items()}
    named["evicted_blocks"] = {
        component: {reason.name.lower(): counts[reason] for reason in EventReason}
        for component, counts in named["evicted_blocks"].items()
    }
    return named


def _by_component(value: Any) -> Any:
    return dict(zip(_COMPONENTS, value, strict=True)) if isinstance(value, list) else value
