"""Matches a second of several processes on one index, alone and beside one that inserts and evicts.

Each configuration runs right after one reader alone, and its speed is given as a ratio to that.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """What a worker did, for each second that passed and for each second of its own CPU time."""

    per_s: float
    per_cpu_s: float


def read(name: str, pipe: Connection) -> None:
    """Match published paths whenever asked to; each match must find all of its path."""
    paths = itertools.cycle(make_paths()[:NUM_READER_PATHS])
    with RadixClient(name, label="reader") as client:

        def match() -> int:
            hit = client.query(next(paths)).common_hit
            if hit != PATH_BLOCKS:
                raise SystemExit(f"a pinned path of {PATH_BLOCKS} blocks matched {hit}")
            return 1

        _work(match, pipe)


def write(name: str, pipe: Connection) -> None:
    """Insert new paths, for which old ones are evicted, whenever asked to."""
    rng = np.random.default_rng([SEED, os.getpid()])
    with RadixClient(name, label="writer") as client:

        def insert() -> int:
            publish(client, new_hashes(rng, WRITER_PATH_BLOCKS))
            return WRITER_PATH_BLOCKS

        while len(client.kvevent_drain(1 << 20)[0]) == 0:  # fill the index until it has to evict
            insert()
        _work(insert, pipe)


def _work(step: Callable[[], int], pipe: Connection) -> None:
    """Each time a number of seconds comes, call ``step`` for so long and answer with a Speed."""
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        num, cpu, start = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() < start + seconds:
            num += step()
        pipe.send(Speed(num / (time.perf_counter() - start), num / (time.process_time() - cpu)))


@contextmanager
def workers(name: str, work: Callable[[str, Connection], None], num: int) -> Iterator[list[Connection]]:
    """Pipes to ``num`` processes that do ``work``."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(num):
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(name, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def run(pipes: Sequence[Connection]) -> list[Speed]:
    """Have the workers behind ``pipes`` work at the same time."""
    for pipe in pipes:
        pipe.send(SECONDS)
    return [pipe.recv() for pipe in pipes]


def measure(name: str, num_readers: int, num_writers: int) -> Row:
    """So many readers and writers against one reader alone, in turn; the median of the rounds' ratios."""
    ratios, cpu_ratios, matches, inserted = [], [], [], []
    with workers(name, read, num_readers) as readers, workers(name, write, num_writers) as writers:
        for _ in range(ROUNDS):
            [alone] = run(readers[:1])
            speeds = run(readers + writers)
            matches.append(sum(speed.per_s for speed in speeds[:num_readers]))
            inserted.append(sum(speed.per_s for speed in speeds[num_readers:]))
            ratios.append(matches[-1] / alone.per_s)
            cpu_ratios.append(sum(speed.per_cpu_s for speed in speeds[:num_readers]) / alone.per_cpu_s)
    ratio = statistics.median(ratios)
    # Half of what so many cores could do: a writer must not halve readers, and readers must add up.
    target = num_readers / 2 if num_writers else max(1.0, num_readers / 2)
    beside = f" + {num_writers} writer ({statistics.median(inserted) / 1e3:.0f}k blocks/s)" * num_writers
    return Row(
        what=f"{num_readers} reader{'s' * (num_readers > 1)}{beside}, matches of {PATH_BLOCKS} blocks",
        measured=f"{ratio:.2f} x one reader ({statistics.median(matches) / 1e3:.0f}k/s)",
        target=f">= {target:g} x",
        limit=f"{num_readers} x; by CPU time, which other processes do not take: "
        f"{statistics.median(cpu_ratios):.2f} x",
        met=ratio >= target,
        value=ratio,
    )


def main() -> None:
    """Emit a row for each number of readers that has cores, alone and with a writer."""
    cores = len(os.sched_getaffinity(0))
    with index_only(NUM_SLOTS) as name, ExitStack() as held:
        client = held.enter_context(RadixClient(name, label="setup"))
        for path in make_paths()[:NUM_READER_PATHS]:
            publish(client, path)
            held.enter_context(client.query(path, lock=True))  # no writer may evict what readers look for
        for num_readers in (num for num in READERS if num <= cores):
            if num_readers > 1:
                emit(measure(name, num_readers, 0))
            if num_readers < cores:
                emit(measure(name, num_readers, 1))


if __name__ == "__main__":
    main()
