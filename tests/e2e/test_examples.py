"""The examples and the demo, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SAMPLE = EXAMPLES / "sample_trace.jsonl"
DEADLINE_S = 240

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@pytest.fixture(autouse=True)
def clean_shm() -> Iterator[None]:
    """Nothing that an example makes may outlive it."""
    yield
    left = [path.name for path in Path("/dev/shm").iterdir() if re.match(OBJECTS, path.name)]
    assert left == []


OBJECTS = r"(quickstart-\d+|shared-prompt-\d+|replay-\d+|demo-\d+)"


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


# -- single examples --------------------------------------------------------------------------------


def test_quickstart(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "quickstart.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 of 8 blocks hit, their first bytes are [0, 1, 2, 3]\n"
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 30


def test_shared_prompt(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "shared_prompt.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    stored, found = done.stdout.splitlines()
    match = re.fullmatch(r"process (\d+) stored 64 blocks", stored)
    other = re.fullmatch(r"process (\d+) found 64 blocks, 64 with the right bytes", found)
    assert match is not None
    assert other is not None
    assert match[1] != other[1]


# -- replay -----------------------------------------------------------------------------------------


def replay_hits(*arguments: str) -> dict[tuple[str, int], int]:
    done = run(str(EXAMPLES / "replay_trace.py"), *arguments)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ *(\d+) blocks, (.*?) *: (\d+) hits", done.stdout, re.MULTILINE)
    return {(policy, int(capacity)): int(hits) for capacity, policy, hits in lines}


def test_sample_trace_has_the_published_format() -> None:
    requests = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert len(requests) > 100
    for request in requests:
        assert set(request) == {"timestamp", "input_length", "output_length", "hash_ids"}
        assert -(-request["input_length"] // 512) == len(request["hash_ids"])
    assert [r["timestamp"] for r in requests] == sorted(r["timestamp"] for r in requests)


def test_replay_of_the_sample_is_close_to_exact_lru() -> None:
    num_blocks = sum(len(json.loads(line)["hash_ids"]) for line in SAMPLE.read_text().splitlines())
    hits = replay_hits()
    capacities = {capacity for _, capacity in hits}
    assert len(capacities) == 3
    for capacity in capacities:
        assert abs(hits["lru", capacity] - hits["exact LRU", capacity]) <= 0.005 * num_blocks
    assert len({hits["exact LRU", capacity] for capacity in capacities}) == 3  # all of them evict


def test_replay_of_a_given_trace_with_every_policy(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    paths = [[0, 1, 2], [0, 1, 3], [4, 5], [0, 1, 2]]
    trace.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": path}) + "\n" for path in paths))
    policies = ("lru", "lfu", "slru", "fifo")
    hits = replay_hits(str(trace), "--capacity", "4", "10", "--policy", *policies)
    # Room for 4: [4, 5] pushes out 2, then 3; then 0 and 1 are there.  Room for 10: everything is.
    expected = {(policy, capacity): 2 + n for policy in policies for capacity, n in ((4, 2), (10, 3))}
    assert hits == {**expected, ("exact LRU", 4): 2 + 2, ("exact LRU", 10): 2 + 3}


def test_replay_names_a_trace_that_is_not_there() -> None:
    done = run(str(EXAMPLES / "replay_trace.py"), "/nowhere/trace.jsonl")
    assert done.returncode == 2
    assert "/nowhere/trace.jsonl is not a file" in done.stderr


# -- the demo ---------------------------------------------------------------------------------------


class Demo:
    """A running demo without a terminal; ``lines`` grows as it prints."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "examples.demo"]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"the demo ended without printing {text!r}:\n{self.output}")

    def finish(self) -> int:
        watchdog = threading.Timer(DEADLINE_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        code = self.process.wait()
        watchdog.cancel()
        self.process.stdout.close()
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def pid(self, of: str) -> int:
        match = re.search(rf"{of} is process (\d+)", self.output)
        assert match is not None, self.output
        return int(match[1])

    def pids(self) -> list[int]:
        return [self.pid(of) for of in ("radix-server", "engine-A", "engine-B")]


@pytest.fixture
def demo() -> Iterator[Demo]:
    demo = Demo()
    demo.read_until("radix-server is process")
    yield demo
    demo.process.kill()
    demo.process.wait()


def assert_ended(pids: Sequence[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_demo(demo: Demo) -> None:
    assert demo.finish() == 0, demo.output
    assert_ended(demo.pids())
    assert "All checks held" in demo.output
    row = re.search(r"B gets the same +(\d+)/\1 +([\d.]+) .*x +equal", demo.output)
    assert row is not None, demo.output
    assert float(row[2]) == int(row[1]) / 4  # a block is 256 KiB
    assert re.search(r"A gets the same .*x +equal", demo.output)
    partial = re.search(r"new question +(\d+)/(\d+) .* equal", demo.output)
    assert partial is not None, demo.output
    assert 0 < int(partial[1]) < int(partial[2])
    assert re.search(r"KV wiped .* differs", demo.output)
    hit, seen = re.findall(r'result="(?:hit|miss)"} +(\d+) +(\d+)', demo.output)[0]
    assert int(hit) == int(seen) > 0
    assert re.search(r"full +1024 ", demo.output)  # radixctl status
    assert "engine-A" in demo.output.split("radixctl --name")[2]  # radixctl clients


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_cleans_up_when_it_is_stopped(demo: Demo, number: signal.Signals) -> None:
    demo.read_until("B gets the same")
    demo.process.send_signal(number)
    assert demo.finish() == 128 + number
    assert_ended(demo.pids())


@pytest.mark.parametrize("victim", ["engine-B", "radix-server"])
def test_demo_fails_and_cleans_up_when_a_process_dies(demo: Demo, victim: str) -> None:
    demo.read_until("A stores a prompt")
    os.kill(demo.pid(victim), signal.SIGKILL)
    assert demo.finish() == 1
    assert "FAILED" in demo.output
    assert "Traceback" not in demo.output
    assert_ended(demo.pids())
