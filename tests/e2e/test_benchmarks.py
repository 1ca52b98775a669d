"""The benchmark runner: table, file of results, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **environ},
    )


def test_table_and_results(tmp_path: Path) -> None:
    done = run("memory", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for text in (
        "what",
        "measured",
        "target",
        "limit / baseline",
        "met?",
        "index memory per FULL slot",
        "<= 80 bytes",
    ):
        assert text in done.stdout
    [path] = tmp_path.iterdir()
    results = json.loads(path.read_text())
    assert results["machine"]["cores"] >= 1
    assert results["commit"][:10] in path.name
    [row] = results["rows"]
    assert row["met"] is True
    assert 0 < row["value"] <= 80


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    done = run("trace", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [row] = json.loads(next(tmp_path.iterdir()).read_text())["rows"]
    assert (row["measured"], row["met"]) == ("not run", None)
    assert "TRACE=path" in row["limit"]


def test_a_benchmark_that_fails_fails_the_run(tmp_path: Path) -> None:
    done = run("trace", "--output", str(tmp_path), RADIX_TRACE="/nowhere/trace.jsonl")
    assert done.returncode == 1
    [row] = json.loads(next(tmp_path.iterdir()).read_text())["rows"]
    assert row["met"] is False
    assert "/nowhere/trace.jsonl" in row["limit"]


def test_unknown_names_are_refused() -> None:
    done = run("no-such-benchmark")
    assert done.returncode == 2
    assert "no-such-benchmark" in done.stderr
