"""A short run of ``make torture`` with what every change must survive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
MIN_KILLS, MIN_RESTARTS = 200, 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_and_restarts_under_load() -> None:
    """No wrong byte, nothing leaked, nobody blocked; see tests/torture/audit.py for what is checked."""
    command = [sys.executable, "-m", "tests.torture", "--seconds", "20", "--max-seconds", "150", "--json"]
    command += ["--seed", str(SEED), "--kills", str(MIN_KILLS), "--restarts", str(MIN_RESTARTS)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    report = json.loads(done.stdout)
    print(f"seed {SEED}: {report}")
    assert report["failures"] == []
    assert report["kills"] >= MIN_KILLS
    assert report["server_kills"] >= MIN_RESTARTS
    assert report["stops"] > 0
    assert report["verified_bytes"] > 1 << 20
    assert report["invariant_checks"] > 0
    assert done.returncode == 0
