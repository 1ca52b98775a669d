"""Damaged regions and SlotStores: an error or a usable region, never a crash, a hang or a surprise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("RADIX_FUZZ_SEED", "1"))
NUMBER = int(os.environ.get("RADIX_FUZZ_REGIONS", "600"))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_damaged_regions_never_crash_anybody() -> None:
    command = [sys.executable, "-m", "tests.fuzz.mutants", "--number", str(NUMBER), "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    report = json.loads(done.stdout)
    print(f"seed {SEED}: {report['ends']}")
    assert report["failures"] == []
    # Damage was found where it matters, and let pass where it does not.
    for end in (
        "use: fine: CorruptRegion",
        "adopt: fine: discarded",
        "adopt: fine: adopted",
        "meddle: fine: used",
    ):
        assert report["ends"][end] > 0
