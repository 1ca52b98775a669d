"""csrc/copy.c by itself: plans, ids, threads, announcements."""

from __future__ import annotations

import os

import numpy as np
import pytest
from flexkv_radix._copy import ffi, lib

NUM_BLOCKS, NUM_SLOTS = 11, 17


class Copier:
    """Random segments in groups, from an array per segment to slots."""

    def __init__(self, rng: np.random.Generator, num_threads: int, max_bytes: int) -> None:
        self.sizes = rng.integers(1, max_bytes, 7)
        self.groups = [0, 0, 1, 1, 1, 2, 3]
        self.engine = [
            rng.integers(0, 256, (NUM_BLOCKS, size + int(rng.integers(0, 50))), dtype=np.uint8)
            for size in self.sizes
        ]
        self.slots = rng.integers(0, 256, (NUM_SLOTS, int(self.sizes.sum()) + 5), dtype=np.uint8)
        starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        segments = [
            (array.ctypes.data, array.shape[1], size, start, group)
            for array, size, start, group in zip(self.engine, self.sizes, starts, self.groups, strict=True)
        ]
        slots = (self.slots.ctypes.data, self.slots.shape[1], NUM_SLOTS, NUM_BLOCKS)
        plan = lib.copy_plan_new(
            ffi.new("copy_segment[]", segments), len(segments), ffi.new("copy_slots *", slots)
        )
        self.plan = ffi.gc(plan, lib.copy_plan_free)
        self.crew = ffi.gc(lib.copy_crew_new(num_threads), lib.copy_crew_free)

    def blocks(self) -> np.ndarray:
        """[NUM_BLOCKS, bytes]: what slots hold of each block."""
        return np.concatenate(
            [array[:, :size] for array, size in zip(self.engine, self.sizes, strict=True)], axis=1
        )

    def run(self, direction: int, blocks, slots, fds=None) -> tuple[int, int]:
        blocks, slots = np.asarray(blocks, dtype=np.int64), np.asarray(slots, dtype=np.int32)
        bad = ffi.new("uint64_t *")
        ids = ffi.from_buffer("int64_t[]", blocks), ffi.from_buffer("int32_t[]", slots), len(blocks)
        event_fds = ffi.NULL if fds is None else ffi.new("int[]", fds)
        return lib.copy_run(self.crew, self.plan, direction, *ids, event_fds, bad), bad[0]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("max_bytes", [40, 3_000, 400_000])
def test_random_segments(num_threads: int, max_bytes: int) -> None:
    rng = np.random.default_rng([num_threads, max_bytes])
    copier = Copier(rng, num_threads, max_bytes)
    for _ in range(10):
        n = int(rng.integers(0, NUM_BLOCKS + 1))
        blocks, slots = rng.permutation(NUM_BLOCKS)[:n], rng.permutation(NUM_SLOTS)[:n]
        expected = copier.slots.copy()
        expected[slots, : copier.sizes.sum()] = copier.blocks()[blocks]
        assert copier.run(lib.COPY_TO_SLOTS, blocks, slots)[0] == lib.COPY_OK
        assert np.array_equal(copier.slots, expected)
        targets = rng.permutation(NUM_BLOCKS)[:n]
        gaps = [array[:, size:].copy() for array, size in zip(copier.engine, copier.sizes, strict=True)]
        expected_blocks = copier.blocks()
        expected_blocks[targets] = copier.slots[slots, : copier.sizes.sum()]
        assert copier.run(lib.COPY_FROM_SLOTS, targets, slots)[0] == lib.COPY_OK
        assert np.array_equal(copier.blocks(), expected_blocks)
        for array, size, gap in zip(copier.engine, copier.sizes, gaps, strict=True):
            assert np.array_equal(array[:, size:], gap)


def test_every_group_is_announced_once_and_empty_runs_at_once() -> None:
    copier = Copier(np.random.default_rng(1), 3, 50_000)
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
    for blocks in ([1, 2, 3], []):
        assert copier.run(lib.COPY_TO_SLOTS, blocks, blocks, [*fds, -1])[0] == lib.COPY_OK
        assert [os.eventfd_read(fd) for fd in fds] == [1, 1, 1]
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    ("blocks", "slots", "code", "position"),
    [
        ([0, 1, NUM_BLOCKS], [0, 1, 2], lib.COPY_EBLOCK, 2),
        ([0, -1, 2], [0, 1, 2], lib.COPY_EBLOCK, 1),
        ([0, 1, 2], [NUM_SLOTS, 1, 2], lib.COPY_ESLOT, 0),
        ([0, 1, 2], [0, 1, -5], lib.COPY_ESLOT, 2),
        ([1 << 62, 1, 2], [0, 1, 2], lib.COPY_EBLOCK, 0),
    ],
)
@pytest.mark.parametrize("direction", [lib.COPY_TO_SLOTS, lib.COPY_FROM_SLOTS])
def test_a_bad_id_moves_and_announces_nothing(blocks, slots, code, position, direction) -> None:
    copier = Copier(np.random.default_rng(2), 2, 1000)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    before = copier.slots.copy(), copier.blocks()
    assert copier.run(direction, blocks, slots, [fd] * 4) == (code, position)
    assert np.array_equal(copier.slots, before[0])
    assert np.array_equal(copier.blocks(), before[1])
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    os.close(fd)


def test_an_eventfd_that_takes_no_signal_is_reported() -> None:
    copier = Copier(np.random.default_rng(3), 2, 1000)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(fd, 2**64 - 2)  # full
    assert copier.run(lib.COPY_TO_SLOTS, [4], [5], [-1, fd, -1, -1])[0] == lib.COPY_ESIGNAL
    assert np.array_equal(copier.slots[5, : copier.sizes.sum()], copier.blocks()[4])
    os.close(fd)


@pytest.mark.parametrize("groups", [[], [1], [0, 2], [0, 1, 0]])
def test_groups_out_of_order_make_no_plan(groups: list[int]) -> None:
    segments = ffi.new("copy_segment[]", [(0, 1, 1, 0, group) for group in groups])
    assert lib.copy_plan_new(segments, len(groups), ffi.new("copy_slots *")) == ffi.NULL
