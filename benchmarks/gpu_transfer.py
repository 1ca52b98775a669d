"""GB/s between GPU blocks and slots, through the transfer worker, beside a contiguous pinned copy.

    python benchmarks/gpu_transfer.py [--json FILE] [--thread-blocks N]

Slots of 2.25 MiB (36 layers × K/V × 32 KiB), random blocks and slots.  One call is one op; "alone" waits
for each call before the next, "queued" keeps 4 under way, as an engine with several requests does.
The contiguous copy moves the bytes of a call at once between pinned and GPU memory: the bus's limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flexkv_radix.layerwise import LayerEvents
from flexkv_radix.layout import KVCacheLayout, KVCacheLayoutType
from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import (
    LayerwiseSocket,
    OpKind,
    PoolSpec,
    RankPart,
    RankPlace,
    RegisterRank,
    StoreSpec,
    TransferConfig,
    TransferOp,
)
from flexkv_radix.transfer.registration import register_rank
from flexkv_radix.transfer.tensors import share_tensors
from radixshmem.geometry import ComponentType

LAYOUT = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 36, 1024, 16, 8, 128)
ITEM_BYTES = 2
SLOT_BYTES = LAYOUT.block_bytes(ITEM_BYTES)
NUM_SLOTS = 1024
CALL_BLOCKS = (1, 4, 16, 64, 256)
BYTES_PER_ROUND = 2 << 30
ROUNDS = 5
DEPTH = 4


@dataclass
class Setup:
    handle: TransferHandle
    events: LayerEvents
    kv: torch.Tensor
    next_op: int = 0

    def op(self, kind: OpKind, blocks: np.ndarray, slots: np.ndarray, layerwise: bool) -> TransferOp:
        self.next_op += 1
        return TransferOp(self.next_op, kind, ComponentType.FULL, blocks, slots, layerwise, 0)

    def wait(self, num_ops: int) -> None:
        """Block until so many more results are in."""
        while num_ops > 0:
            results = self.handle.poll(30.0)
            if not results or not all(result.ok for result in results):
                raise RuntimeError(f"transfer failed: {results}")
            num_ops -= len(results)


@contextlib.contextmanager
def set_up(thread_blocks: int) -> Iterator[Setup]:
    """A store in /dev/shm, KV tensors on GPU 0, a worker that is ready."""
    path = f"/dev/shm/gpu_transfer_{os.getpid()}"
    kv = torch.randint(0, 256, (LAYOUT.num_block * SLOT_BYTES,), dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as directory, open(path, "wb+") as file:
        file.truncate(4096 + NUM_SLOTS * SLOT_BYTES)
        os.posix_fallocate(file.fileno(), 0, 4096 + NUM_SLOTS * SLOT_BYTES)
        pool = PoolSpec(ComponentType.FULL, 4096, NUM_SLOTS, SLOT_BYTES, SLOT_BYTES)
        layerwise = f"{directory}/layerwise"
        config = TransferConfig(
            StoreSpec(path, (pool,)),
            1,
            f"{directory}/register",
            0,
            thread_blocks,
            (LayerwiseSocket(layerwise),),
        )
        handle = TransferHandle(config, lease_fd=file.fileno())
        handle.start()
        try:
            shared = share_tensors([kv])
            segments = tuple(LAYOUT.segments(1, ITEM_BYTES))
            part = RankPart(ComponentType.FULL, LAYOUT.num_block, shared.views, segments)
            rank = RegisterRank(RankPlace(), shared.storages, (part,), shared.device_uuid)
            registration = register_rank(config.register_endpoint, rank, ())
            events = LayerEvents(LAYOUT.num_layer)
            events.connect(layerwise, 0, 1)
            while not handle.is_ready():
                time.sleep(0.01)
            yield Setup(handle, events, kv)
            registration.close()
        finally:
            handle.shutdown()
            os.unlink(path)


def check(setup: Setup) -> None:
    """A store and a load of the benchmark's own bytes, compared."""
    blocks, slots = np.arange(64), np.arange(64, dtype=np.int32)[::-1].copy()
    setup.handle.submit([setup.op(OpKind.D2H, blocks, slots, False)])
    setup.wait(1)
    before = setup.kv.clone()
    setup.kv.zero_()
    torch.cuda.synchronize()
    setup.handle.submit([setup.op(OpKind.H2D, blocks, slots, False)])
    setup.wait(1)
    shape = (72, LAYOUT.num_block, -1)
    if not torch.equal(setup.kv.view(shape)[:, :64], before.view(shape)[:, :64]):
        raise RuntimeError("the bytes that came back differ")
    setup.kv.copy_(before)
    torch.cuda.synchronize()


def measure(
    setup: Setup, kind: OpKind, n: int, depth: int, layerwise: bool, rng: np.random.Generator
) -> float:
    """GB/s of calls of n blocks, depth of them under way."""
    num_calls = max(4, BYTES_PER_ROUND // (n * SLOT_BYTES))
    if n < 16:
        num_calls = min(num_calls, 100)
    calls = [
        (rng.permutation(LAYOUT.num_block)[:n], rng.permutation(NUM_SLOTS)[:n].astype(np.int32))
        for _ in range(num_calls)
    ]
    begin = time.perf_counter()
    under_way = 0
    for blocks, slots in calls:
        setup.handle.submit([setup.op(kind, blocks, slots, layerwise)])
        under_way += 1
        if under_way == depth:
            setup.wait(1)
            under_way -= 1
    setup.wait(under_way)
    return num_calls * n * SLOT_BYTES / (time.perf_counter() - begin) / 1e9


def measure_contiguous(kind: OpKind, n: int) -> float:
    """GB/s of copies of n blocks' bytes, back to back, between pinned and GPU memory."""
    num_bytes = n * SLOT_BYTES
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    source, target = (gpu, host) if kind is OpKind.D2H else (host, gpu)
    repeats = max(4, BYTES_PER_ROUND // num_bytes)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return repeats * num_bytes / (time.perf_counter() - begin) / 1e9


def run(setup: Setup) -> list[dict[str, float | int | str]]:
    rng = np.random.default_rng(1)
    rows: list[dict[str, float | int | str]] = []
    for n in CALL_BLOCKS:
        for kind in (OpKind.D2H, OpKind.H2D):
            variants = {"alone": (1, False), "queued": (DEPTH, False)}
            if kind is OpKind.H2D:
                variants["layerwise alone"] = (1, True)
                variants["layerwise queued"] = (DEPTH, True)
            samples: dict[str, list[float]] = {name: [] for name in ("contiguous", *variants)}
            for _ in range(ROUNDS):  # in turn, so that a slow moment hits all alike
                samples["contiguous"].append(measure_contiguous(kind, n))
                for name, (depth, layerwise) in variants.items():
                    samples[name].append(measure(setup, kind, n, depth, layerwise, rng))
            limit = statistics.median(samples["contiguous"])
            for name, values in samples.items():
                gbps = statistics.median(values)
                rows.append(
                    {"kind": kind.name, "blocks": n, "how": name, "gbps": gbps, "ratio": gbps / limit}
                )
    return rows


def show(rows: list[dict[str, float | int | str]]) -> None:
    print(f"\n{'':<24}" + "".join(f"{n:>16}" for n in CALL_BLOCKS) + "   blocks a call")
    for kind in ("D2H", "H2D"):
        for how in dict.fromkeys(str(row["how"]) for row in rows if row["kind"] == kind):
            line = [row for row in rows if row["kind"] == kind and row["how"] == how]
            cells = "".join(f"{row['gbps']:>8.1f} ({row['ratio']:.3f})" for row in line)
            print(f"{kind} {how:<20}{cells}")
    print("GB/s (ratio to the contiguous copy); published for FlexKV's layerwise loads: 7-12 of 37 GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--thread-blocks", type=int, default=0)
    arguments = parser.parse_args()
    with set_up(arguments.thread_blocks) as setup:
        check(setup)
        rows = run(setup)
    show(rows)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        machine = {"gpu": torch.cuda.get_device_name(), "host": platform.platform(), "commit": commit}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
