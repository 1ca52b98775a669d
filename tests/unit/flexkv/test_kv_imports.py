"""What a process loads is what it needs: a transfer worker starts while an engine waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_HEAVY = {"torch", "pydantic", "yaml", "zmq", "prometheus_client", "grpc", "rich"}


@pytest.mark.parametrize(
    ("modules", "may_load"),
    [
        ("flexkv_radix", set()),
        ("flexkv_radix.transfer.worker, flexkv_radix.transfer.cpu", set()),
        ("flexkv_radix.tp_client", set()),
        ("flexkv_radix.server.server", {"zmq", "prometheus_client", "grpc"}),
        ("flexkv_radix.manager", _HEAVY - {"torch", "zmq", "rich"}),
    ],
)
def test_nothing_heavy_that_is_not_needed(modules: str, may_load: set[str]) -> None:
    script = f"import sys, {modules}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    loaded = _HEAVY & set(output.split())
    assert loaded <= may_load
