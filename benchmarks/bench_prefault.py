"""Speed of making a SlotStore's pages, against threads that memset as many bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks.row import at_least, emit
from radixshmem.prefault import Prefault, allocate_pages, touch_threads

NUM_BYTES = 1 << 30
ROUNDS = 5
TARGET_RATIO = 0.8


@contextmanager
def shm_file() -> Iterator[int]:
    """A new file in /dev/shm that nobody sees and that is gone with its fd."""
    path = f"/dev/shm/bench-prefault-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    try:
        yield fd
    finally:
        os.close(fd)


def seconds(call: Callable[[], object]) -> float:
    """How long ``call`` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memset(mapping: mmap.mmap, num_threads: int) -> None:
    """Fill ``mapping`` with ``num_threads`` threads, each its part."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    part = NUM_BYTES // num_threads
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda i: ctypes.memset(address + i * part, 1, part), range(num_threads)))


def one_round(num_threads: int) -> tuple[float, float, float]:
    """Seconds for a prefault, a memset of a new file's pages, and a memset of pages that exist."""
    with shm_file() as fd:
        prefault_s = seconds(lambda: allocate_pages(fd, NUM_BYTES, "benchmark", Prefault()))
    with shm_file() as fd:
        os.ftruncate(fd, NUM_BYTES)
        mapping = mmap.mmap(fd, NUM_BYTES)
        new_s = seconds(lambda: memset(mapping, num_threads))
        existing_s = seconds(lambda: memset(mapping, num_threads))
    return prefault_s, new_s, existing_s


def main() -> None:
    """Emit the median of the ratios of each round."""
    num_threads = touch_threads(Prefault())
    rounds = [one_round(num_threads) for _ in range(ROUNDS)]
    ratio = statistics.median(new_s / prefault_s for prefault_s, new_s, _ in rounds)
    rates = [NUM_BYTES / statistics.median(times) / 1e9 for times in zip(*rounds, strict=True)]
    emit(
        at_least(
            f"prefault of 1 GiB, {num_threads} threads ({rates[0]:.2f} GB/s)",
            ratio,
            TARGET_RATIO,
            "of a parallel memset",
            f"memset of new pages {rates[1]:.2f} GB/s, of existing ones {rates[2]:.2f} GB/s",
        )
    )


if __name__ == "__main__":
    main()
