"""Matches a second of several processes on one index, alone and beside one that inserts and evicts.

Each configuration runs right after one reader alone, and its speed is given as a ratio to that.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from benchmarks.row import Row, emit
from benchmarks.tree import PATH_BLOCKS, SEED, index_only, make_paths, new_hashes, publish
from radixshmem import RadixClient

NUM_READER_PATHS = 16
WRITER_PATH_BLOCKS = 256
NUM_SLOTS = 60_000
SECONDS = 1.0
ROUNDS = 5
READERS = (1, 2, 4, 8, 16)


class Speed(NamedTuple):
    """Calls a second, summed over the processes of a kind."""

    matches: float
    inserted_blocks: float


def read(name: str, pipe: Connection) -> None:
    """Match published paths until the time is up; each match must find all of its path."""
    paths = make_paths()[:NUM_READER_PATHS]
    with RadixClient(name, label="reader") as client:
        held = [client.query(path, lock=True) for path in paths]  # the writer must not evict what we time
        end = _start(pipe)
        num = 0
        while time.perf_counter() < end:
            hit = client.query(paths[num % NUM_READER_PATHS]).common_hit
            if hit != PATH_BLOCKS:
                raise SystemExit(f"a pinned path of {PATH_BLOCKS} blocks matched {hit}")
            num += 1
        for match in held:
            assert match.finalize is not None
            match.finalize()
    pipe.send(num / SECONDS)


def write(name: str, pipe: Connection) -> None:
    """Insert new paths, for which old ones are evicted, until the time is up."""
    rng = np.random.default_rng([SEED, os.getpid()])
    with RadixClient(name, label="writer") as client:
        while len(client.kvevent_drain(1 << 20)[0]) == 0:  # fill the index until it has to evict
            publish(client, new_hashes(rng, WRITER_PATH_BLOCKS))
        end = _start(pipe)
        num = 0
        while time.perf_counter() < end:
            publish(client, new_hashes(rng, WRITER_PATH_BLOCKS))
            num += WRITER_PATH_BLOCKS
    pipe.send(num / SECONDS)


def _start(pipe: Connection) -> float:
    """Say that this process is ready, wait for the others; returns when to stop."""
    pipe.send("ready")
    pipe.recv()
    return time.perf_counter() + SECONDS


def run_together(name: str, num_readers: int, num_writers: int) -> Speed:
    """Run so many processes at the same time."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for work in [read] * num_readers + [write] * num_writers:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(name, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    speeds = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return Speed(sum(speeds[:num_readers]), sum(speeds[num_readers:]))


def measure(name: str, num_readers: int, num_writers: int) -> Row:
    """The configuration against one reader alone, in turn; the median of the rounds' ratios."""
    ratios, together = [], []
    for _ in range(ROUNDS):
        alone = run_together(name, 1, 0)
        together.append(run_together(name, num_readers, num_writers))
        ratios.append(together[-1].matches / alone.matches)
    return _row(num_readers, num_writers, statistics.median(ratios), together)


def _row(num_readers: int, num_writers: int, ratio: float, speeds: Sequence[Speed]) -> Row:
    matches = statistics.median(speed.matches for speed in speeds)
    inserted = statistics.median(speed.inserted_blocks for speed in speeds)
    beside = f" + {num_writers} writer ({inserted / 1e3:.0f}k blocks/s inserted)" if num_writers else ""
    # Half of what so many cores could do: a writer must not halve readers, and readers must add up.
    target = num_readers / 2 if num_writers else max(1.0, num_readers / 2)
    return Row(
        what=f"{num_readers} reader{'s' * (num_readers > 1)}{beside}, matches of {PATH_BLOCKS} blocks",
        measured=f"{ratio:.2f} x one reader ({matches / 1e3:.0f}k/s)",
        target=f">= {target:g} x",
        limit=f"{num_readers} x; {os.cpu_count()} cores",
        met=ratio >= target,
        value=ratio,
    )


def main() -> None:
    """Emit a row for each number of readers that has cores, alone and with a writer."""
    cores = len(os.sched_getaffinity(0))
    with index_only(NUM_SLOTS) as name:
        with RadixClient(name, label="setup") as client:
            for path in make_paths()[:NUM_READER_PATHS]:
                publish(client, path)
        for num_readers in (num for num in READERS if num <= cores):
            if num_readers > 1:
                emit(measure(name, num_readers, 0))
            if num_readers < cores:
                emit(measure(name, num_readers, 1))


if __name__ == "__main__":
    main()
