"""What should move blocks between GPU and pinned host memory?  Compares candidates on one GPU.

    python -m benchmarks.gpu_kernels

All move the same blocks (2.25 MiB slots of 72 segments of 32 KiB) in random order and are checked byte
for byte.  First alone, as GB/s and as a ratio to a contiguous copy of the same bytes in the same run;
then beside matrix products of another process, which stand for the engine's own work.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_candidates import SLOT_BYTES, Bench, Run, candidates

SIZES = (16, 64, 256)
BESIDE = (
    "contiguous",
    "kernel, 16 thread blocks",
    "rows, 72 a command",
    "batch, 2 threads",
    "batch for each layer",
)
LOOP_S, PRODUCTS_S = 2.5, 1.5


def check(b: Bench, run: Run, name: str) -> None:
    """One store and one load against what torch's indexing says."""
    b.gpu.random_(0, 256)
    torch.cuda.synchronize()
    run(1)
    torch.cuda.synchronize()
    expected = b.gpu[:, b.blocks].transpose(0, 1).reshape(b.n, SLOT_BYTES).cpu()
    assert torch.equal(b.host_tensor[torch.from_numpy(b.slot_ids).long()], expected), f"{name}: store"
    b.gpu.zero_()
    torch.cuda.synchronize()
    run(0)
    torch.cuda.synchronize()
    loaded = b.gpu[:, b.blocks].transpose(0, 1).reshape(b.n, SLOT_BYTES).cpu()
    assert torch.equal(loaded, expected), f"{name}: load"


def median_seconds(b: Bench, work: Callable[[], None], repeats: int) -> float:
    """Of calls one after the other, from the first command to the last byte."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def compare(is_shared: bool) -> None:
    b = Bench(is_shared=is_shared)
    rows: dict[str, dict[tuple[int, int], float]] = {}
    for name, make in candidates(b).items():
        try:
            b.set_ids(64, 1)
            run = make()
            if name != "contiguous":
                check(b, run, name)
        except Exception as error:  # noqa: BLE001 - a candidate that does not run is a result
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        rows[name] = {}
        for n in SIZES:
            b.set_ids(n, 2)
            for to_slots in (1, 0):
                seconds = median_seconds(b, functools.partial(run, to_slots), 12 if n < 256 else 6)
                rows[name][n, to_slots] = n * SLOT_BYTES / seconds / 1e9
    show(rows, "slots in /dev/shm" if is_shared else "slots in anonymous memory")


def show(rows: dict[str, dict[tuple[int, int], float]], title: str) -> None:
    print(f"\n{title + ': GB/s (ratio)':<44}", *(f"{kind} {n:<9}" for kind in ("D2H", "H2D") for n in SIZES))
    base = rows["contiguous"]
    for name, gbps in rows.items():
        cells = [
            f"{gbps[n, kind]:5.1f} ({gbps[n, kind] / base[n, kind]:.3f})" for kind in (1, 0) for n in SIZES
        ]
        print(f"{name:<44}", *cells, flush=True)


def loop(name: str, to_slots: int) -> None:
    """Run a candidate for a while, two calls of 64 blocks queued at a time; prints GB/s."""
    b = Bench(is_shared=True)
    b.set_ids(64, 3)
    run = candidates(b)[name]()
    run(to_slots)
    torch.cuda.synchronize()
    print("ready", flush=True)
    begin, calls, ends = time.perf_counter(), 0, [torch.cuda.Event(), torch.cuda.Event()]
    while time.perf_counter() - begin < LOOP_S:
        if calls >= 2:
            ends[calls % 2].synchronize()
        run(to_slots)
        ends[calls % 2].record(b.stream)
        calls += 1
    torch.cuda.synchronize()
    print(calls * 64 * SLOT_BYTES / (time.perf_counter() - begin) / 1e9, flush=True)


def products_per_s() -> float:
    """bf16 products of 4096 x 4096 matrices a second."""
    a, c = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(10):
        torch.matmul(a, c, out=out)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < PRODUCTS_S:
        for _ in range(20):
            torch.matmul(a, c, out=out)
        torch.cuda.synchronize()
        count += 20
    return count / (time.perf_counter() - begin)


def interference() -> None:
    """What a transfer in another process does to an engine's matrix products, and they to it."""
    alone = products_per_s()
    print(f"\n{'beside matrix products of another process':<44}{'GB/s':>8}{'products left':>16}")
    for name in BESIDE:
        for kind, to_slots in (("D2H", 1), ("H2D", 0)):
            command = ["--loop", name, "--to-slots", str(to_slots)]
            with _spawn(*command) as child:
                assert child.stdout is not None
                if child.stdout.readline().strip() != "ready":
                    print(f"{name}: did not run", flush=True)
                    continue
                rate = products_per_s()
                gbps = float(child.stdout.readline())
            print(f"{name + ' ' + kind:<44}{gbps:>8.1f}{rate / alone:>15.0%}", flush=True)


def _spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", choices=["shared", "anonymous"])
    parser.add_argument("--loop")
    parser.add_argument("--to-slots", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.loop:
        loop(arguments.loop, arguments.to_slots)
    elif arguments.compare:
        compare(arguments.compare == "shared")
    else:
        for memory in ("shared", "anonymous"):  # apart: a failed candidate may take the CUDA context with it
            subprocess.run([sys.executable, "-m", "benchmarks.gpu_kernels", "--compare", memory], check=False)
        interference()


if __name__ == "__main__":
    main()
