"""Transfers between GPU tensors and slots through KVManager.launch, beside a contiguous pinned copy.

    python -m benchmarks.gpu_transfer [--json FILE] [--hugepage-path PATH]

One call is one launch(); "alone" waits for each before the next, "4 queued" keeps four under way, as an
engine with several requests does.  The contiguous copy moves the bytes of a call at once between pinned
and GPU memory: the bus's limit, measured in turn with the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import describe_commit, describe_machine
from benchmarks.transfer_engine import SLOT_BYTES, TransferEngine, transfer_engine

NUM_BLOCKS = 2304
CALL_BLOCKS = (1, 4, 16, 64, 256)
MAX_CALLS = 48
ROUNDS = 3
DEPTHS = {"alone": 1, "4 queued": 4}
# Engines: all layers in one tensor or a tensor each; then other ways than those chosen by themselves.
SETUPS: dict[str, tuple[bool, dict[str, str]]] = {
    "one tensor": (True, {}),
    "tensor per layer": (False, {}),
    "tensor per layer, 3 threads": (False, {"FLEXKV_TRANSFER_QUEUE_THREADS": "3"}),
    "one tensor, batch": (True, {"FLEXKV_TRANSFER_PATH": "batch"}),
    "one tensor, kernel": (True, {"FLEXKV_TRANSFER_PATH": "kernel"}),
}


@dataclass(frozen=True)
class Result:
    setup: str
    what: str
    blocks: int
    gbps: float
    ratio: float  # to the contiguous copy


def contiguous_gbps(to_host: bool, n: int) -> float:
    """GB/s of copies of n blocks' bytes, back to back, between pinned and GPU memory."""
    host = torch.empty(n * SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(n * SLOT_BYTES, dtype=torch.uint8, device="cuda")
    source, target = (gpu, host) if to_host else (host, gpu)
    repeats = max(4, 512 // n)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return repeats * n * SLOT_BYTES / (time.perf_counter() - begin) / 1e9


def measure(setup: str, engine: TransferEngine) -> list[Result]:
    """Medians over rounds in which everything has its turn."""
    results = []
    for n in CALL_BLOCKS:
        num_calls = min(MAX_CALLS, NUM_BLOCKS * 9 // 10 // n)
        engine.round(min(num_calls, 4), n, 1)
        samples: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for kind in ("D2H", "H2D"):
                limit = contiguous_gbps(kind == "D2H", n)
                samples.setdefault(f"{kind} contiguous copy", []).append(limit)
            for name, depth in DEPTHS.items():
                for what, gbps in engine.round(num_calls, n, depth).items():
                    samples.setdefault(f"{what} {name}", []).append(gbps)
        for what, values in samples.items():
            limit = statistics.median(samples[f"{what[:3]} contiguous copy"])
            gbps = statistics.median(values)
            results.append(Result(setup, what, n, gbps, gbps / limit))
    return results


def show(results: list[Result]) -> None:
    print(f"\n{'GB/s (ratio to the contiguous copy)':<46}" + "".join(f"{n:>15}" for n in CALL_BLOCKS))
    for setup in dict.fromkeys(result.setup for result in results):
        for what in sorted({result.what for result in results if result.setup == setup}):
            line = [result for result in results if (result.setup, result.what) == (setup, what)]
            cells = "".join(f"{result.gbps:>7.1f} ({result.ratio:.3f})" for result in line)
            print(f"{setup + ': ' + what:<46}{cells}")


def matmuls(seconds: float) -> None:
    """Print how many bf16 products of 4096 x 4096 matrices a second this process gets done."""
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for _ in range(20):
        torch.matmul(a, b)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(20):
            torch.matmul(a, b)
        torch.cuda.synchronize()
        count += 20
    print(count / (time.perf_counter() - begin), flush=True)


class Beside:
    """Matrix products in another process, which stands for the engine's own work."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_transfer", "--matmuls"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def run(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        rate = float(self._process.stdout.readline())
        self._process.wait()
        return rate


def interference(engine: TransferEngine) -> None:
    """GB/s of rounds of 64 blocks a call while another process computes, and what that loses."""
    alone = Beside().run()
    rates: list[float] = []
    beside = Beside()
    thread = threading.Thread(target=lambda: rates.append(beside.run()))
    thread.start()
    samples: dict[str, list[float]] = {}
    while thread.is_alive():
        for what, gbps in engine.round(14, 64, 4).items():
            samples.setdefault(what, []).append(gbps)
    thread.join()
    moved = ", ".join(
        f"{what} {statistics.median(values[:-1] or values):.1f}" for what, values in samples.items()
    )
    print(
        f"beside another process's matrix products: {moved} GB/s; {rates[0] / alone:.0%} of the products left"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--matmuls", action="store_true")
    parser.add_argument("--hugepage-path", default="", help="a hugetlbfs mount to put the slots in")
    arguments = parser.parse_args()
    if arguments.matmuls:
        matmuls(2.0)
        return
    results: list[Result] = []
    for setup, (one_tensor, settings) in SETUPS.items():
        with transfer_engine(
            "cuda",
            NUM_BLOCKS,
            one_tensor=one_tensor,
            settings=settings,
            hugepage_path=arguments.hugepage_path,
        ) as engine:
            engine.check()
            results += measure(setup, engine)
            show([result for result in results if result.setup == setup])
            interference(engine)
    print("Blocks a call in the columns.  Published for FlexKV's layerwise loads: 7-12 of 37 GB/s.")
    if arguments.json:
        machine = {"gpu": torch.cuda.get_device_name(), **describe_machine()}
        commit = describe_commit(Path(__file__).parents[1])
        rows = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps({"machine": machine, **commit, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
