"""The C driver's rows: match, insert and evict without Python (csrc/tests/bench.c)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.row import emit, parse

CSRC = Path(__file__).parents[1] / "csrc"


def main() -> int:
    """Build and run the driver, pass its rows on."""
    command = ["make", "--no-print-directory", "-s", "-C", str(CSRC), "bench"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        row = parse(line)
        if row is not None:
            emit(row)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
