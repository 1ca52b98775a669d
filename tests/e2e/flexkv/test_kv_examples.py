"""examples/flexkv_*.py, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert not list(Path("/dev/shm").glob("flexkv-example-*"))
    return done.stdout.splitlines()


def loaded_by_process(lines: list[str]) -> dict[int, list[tuple[int, int]]]:
    """(prompt, tokens loaded) by process."""
    result: dict[int, list[tuple[int, int]]] = {}
    for line in lines:
        process, prompt, loaded = re.match(r"process (\d+), prompt (\d+): loaded (\d+)", line).groups()
        result.setdefault(int(process), []).append((int(prompt), int(loaded)))
    return result


def test_round_trip() -> None:
    assert run("flexkv_round_trip.py") == [
        "stored 96 of 100 tokens: success",
        "loaded 64 of 128 tokens: success",
        "the bytes are those that were stored",
    ]


def test_two_engines() -> None:
    first, second = loaded_by_process(run("flexkv_two_engines.py")).values()
    assert first == [(0, 0), (1, 0), (2, 0)]
    assert second == [(2, 192), (1, 192), (3, 0)]


def test_kv_server() -> None:
    first, second = loaded_by_process(run("flexkv_kv_server.py")).values()
    assert first == [(1, 0), (2, 0), (3, 0)]
    assert second == [(1, 192), (2, 192), (3, 192)]
