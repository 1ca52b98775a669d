"""The KVServer as a process, and what it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from daemon import eventually

from flexkv_radix.server import liveness

ROOT = Path(__file__).resolve().parents[2]
EXTERNAL = {"FLEXKV_SERVER_LAUNCH_MODE": "external"}
EMBEDDED = {"FLEXKV_SERVER_LAUNCH_MODE": "embedded"}


def start_server(directory: Path) -> subprocess.Popen[bytes]:
    """An external KVServer at the endpoint that engines in directory use."""
    endpoint = f"ipc://{directory}/flexkv"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "flexkv_radix.server", "--endpoint", endpoint],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))},
    )
    eventually(lambda: Path(liveness.liveness_path(endpoint)).exists(), "the KVServer's socket")
    return process


def children_of(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def is_over(pid: int) -> bool:
    """Whether the process touches no memory any more, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
