"""Where and on what a benchmark ran."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np


def describe_machine() -> dict[str, str | int | float]:
    """CPU, cores, memory, load and versions."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_kib": int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]),
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def describe_commit(root: Path) -> dict[str, str | bool]:
    """Commit of the repository at ``root``, and whether tracked files differ from it."""
    return {
        "commit": _git(root, "rev-parse", "HEAD") or "unknown",
        "is_modified": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
    }


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _field(path: str, key: str) -> str:
    with open(path) as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
