"""Transfers between CPU tensors and slots, through KVManager.launch, against memcpy with the same threads."""

from __future__ import annotations

import statistics
import time

import numpy as np
from flexkv_radix._copy import ffi, lib

from benchmarks.row import at_least, emit
from benchmarks.transfer_engine import SLOT_BYTES, transfer_engine
from flexkv_radix.transfer.cpu import default_threads

NUM_BLOCKS = 128
CALL_BLOCKS = (16, 64)
DEPTH = 4
ROUNDS = 9
TARGET = 0.85


def memcpy_gbps(crew: object, to: np.ndarray, source: np.ndarray, num_calls: int, num_bytes: int) -> float:
    """GB/s of as many copies of as many bytes, through buffers as large as the engine's."""
    begin = time.perf_counter()
    for call in range(num_calls):
        start = call * num_bytes % (len(to) - num_bytes + 1)
        lib.copy_plain(crew, to.ctypes.data + start, source.ctypes.data + start, num_bytes)
    return num_calls * num_bytes / (time.perf_counter() - begin) / 1e9


def main() -> None:
    """Emit stores, loads and layerwise loads for each size of call."""
    num_threads = default_threads()
    crew = ffi.gc(lib.copy_crew_new(num_threads), lib.copy_crew_free)
    target = np.ones(NUM_BLOCKS * SLOT_BYTES, dtype=np.uint8)
    with transfer_engine("cpu", NUM_BLOCKS, one_tensor=True) as engine:
        source = engine.kv[0].view(-1).numpy().view(np.uint8)
        engine.check()
        for n in CALL_BLOCKS:
            num_calls = NUM_BLOCKS // n
            engine.round(num_calls, n, DEPTH)  # touches all pages
            ratios: dict[str, list[float]] = {}
            limits = []
            for _ in range(ROUNDS):
                limit = memcpy_gbps(crew, target, source, num_calls, n * SLOT_BYTES)
                limits.append(limit)
                for what, gbps in engine.round(num_calls, n, DEPTH).items():
                    ratios.setdefault(what, []).append(gbps / limit)
            for what, values in ratios.items():
                emit(
                    at_least(
                        f"{what} through KVManager.launch, CPU tensors, {n} blocks a call",
                        statistics.median(values),
                        TARGET,
                        "of memcpy",
                        f"memcpy with {num_threads} threads: {statistics.median(limits):.1f} GB/s",
                    )
                )


if __name__ == "__main__":
    main()
