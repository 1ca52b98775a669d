"""Run every benchmark and print one table: python -m benchmarks.run [NAME ...] [--output FOLDER]

Two kinds of files are found beside this one: ``bench_*.py``, scripts that hand over rows
(``benchmarks.row``), and ``test_*.py``, for pytest-benchmark.  NAMEs select files by a part of their
name.  Rows, machine and commit go to a JSON file in FOLDER.  The exit code tells whether all of it ran,
not whether targets were met: that depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.machine import describe_commit, describe_machine
from benchmarks.report import result_table
from benchmarks.row import SKIPPED, Row, at_least, at_most, parse

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800


def run_script(path: Path) -> tuple[list[Row], bool]:
    """Rows of a script, and whether it ran to its end."""
    command = [sys.executable, "-m", f"benchmarks.{path.stem}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    rows = [row for line in done.stdout.splitlines() if (row := parse(line)) is not None]
    if done.returncode == 0:
        return rows, True
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode == SKIPPED:
        return [*rows, Row(path.stem, "not run", limit=reason)], True
    print(done.stderr, file=sys.stderr)
    return [*rows, Row(path.stem, f"failed with exit code {done.returncode}", limit=reason, met=False)], False


def run_pytest(path: Path) -> tuple[list[Row], bool]:
    """Rows of a pytest-benchmark file; each test names its row in ``extra_info``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", str(path), f"--benchmark-json={report}"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        benchmarks = json.loads(report.read_text())["benchmarks"] if report.exists() else []
    rows = [_micro_row(benchmark["stats"]["median"], **benchmark["extra_info"]) for benchmark in benchmarks]
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        rows.append(Row(path.stem, f"failed with exit code {done.returncode}", met=False))
    return rows, done.returncode == 0


def _micro_row(
    median_s: float,
    what: str,
    limit: str,
    target_us: float | None = None,
    at_least_per_s: float | None = None,
    unit: str = "us",
    amount: float = 0.0,
) -> Row:
    """``target_us`` bounds the median; ``at_least_per_s`` is what ``amount`` / median must reach."""
    if at_least_per_s is not None:
        return at_least(what, amount / median_s, at_least_per_s, unit, limit)
    if target_us is not None:
        return at_most(what, median_s * 1e6, target_us, unit, limit, 1)
    return Row(what, f"{median_s * 1e6:.1f} us", limit=limit, value=median_s * 1e6)


def find(names: Iterable[str]) -> list[Path]:
    """Benchmark files whose names contain one of ``names``; all when there are none."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("test_*.py"), *folder.glob("bench_*.py")])
    wanted = list(names)
    return [path for path in paths if not wanted or any(name in path.stem for name in wanted)]


def write_results(folder: Path, rows: list[Row]) -> Path:
    """Write rows, machine and commit; returns the file."""
    commit = describe_commit(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{str(commit['commit'])[:10]}.json"
    results = {"machine": describe_machine(), **commit, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def main() -> int:
    """Run what was asked for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results", metavar="FOLDER")
    arguments = parser.parse_args()
    paths = find(arguments.names)
    if not paths:
        parser.error(f"NAME: no benchmark is called like {' or '.join(arguments.names)}")
    console = Console(highlight=False)
    rows: list[Row] = []
    all_ran = True
    for path in paths:
        console.print(f"{path.stem} ...")
        more, ran = run_pytest(path) if path.stem.startswith("test_") else run_script(path)
        rows += more
        all_ran &= ran
    result_table(console, rows)
    console.print(f"written to {write_results(arguments.output, rows)}", soft_wrap=True)
    return 0 if all_ran else 1


if __name__ == "__main__":
    sys.exit(main())
