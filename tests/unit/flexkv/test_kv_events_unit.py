"""Announcements that follow from ring events."""

from __future__ import annotations

import numpy as np

from flexkv_radix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventTracker
from flexkv_radix.ring import RingEvents

T = 2
TOKENS = np.arange(8, dtype=np.int64)
PATH = np.array([1 << 63, 11, 12, 13], dtype=np.uint64)


def ring(*events: tuple[int, int], overflow: bool = False) -> RingEvents:
    kinds = np.array([kind for kind, _ in events], dtype=np.int8)
    return RingEvents(0, kinds, np.array([block_hash for _, block_hash in events], dtype=np.uint64), overflow)


def tracker(max_blocks: int = 100) -> EventTracker:
    one = EventTracker(T, max_blocks)
    one.remember(TOKENS, PATH)
    return one


def test_neighbours_are_joined() -> None:
    events = tracker().translate(ring((1, 1 << 63), (1, 11), (1, 13), (-1, 13), (-1, 11)))
    assert events == [
        BlockStored([1 << 63, 11], None, [0, 1, 2, 3], T),
        BlockStored([13], 12, [6, 7], T),
        BlockRemoved([13, 11]),
    ]


def test_unknown_and_repeated_events_say_nothing() -> None:
    one = tracker()
    assert one.translate(ring((1, 99), (-1, 11), (-1, 99))) == []
    one.translate(ring((1, 11)))
    assert one.translate(ring((1, 11))) == []


def test_cleared() -> None:
    one = tracker()
    one.translate(ring((1, 11)))
    assert one.translate(ring((0, 0), (1, 11))) == [AllBlocksCleared(), BlockStored([11], 1 << 63, [2, 3], T)]


def test_forget() -> None:
    one = tracker()
    one.translate(ring((1, 11)))
    one.forget()
    assert one.withdrawals() == [AllBlocksCleared()]
    assert one.withdrawals() == []
    assert one.translate(ring((-1, 11), (1, 11))) == []


def test_what_is_remembered_after_a_forget_comes_behind_it() -> None:
    one = tracker()
    one.translate(ring((1, 11)))
    one.forget()
    one.remember(TOKENS, PATH + np.uint64(20))
    events = one.translate(ring((1, 12), (1, 31)))
    assert events == [AllBlocksCleared(), BlockStored([31], (1 << 63) + 20, [2, 3], T)]


def test_after_an_overrun_what_is_there_is_announced_again() -> None:
    one = tracker()
    one.translate(ring((1, 11), (1, 12)))
    asked = []

    def present(path: np.ndarray) -> int:
        asked.append(path.tolist())
        return 2

    events = one.announce_again(present)
    assert asked == [PATH.tolist()]
    assert events == [AllBlocksCleared(), BlockStored([1 << 63, 11], None, [0, 1, 2, 3], T)]
    assert one.translate(ring((-1, 11))) == [BlockRemoved([11])]


def test_memory_is_bounded_and_what_is_forgotten_is_withdrawn() -> None:
    one = tracker(max_blocks=4)
    one.translate(ring((1, 1 << 63), (1, 11)))
    one.remember(TOKENS[:4] + 100, np.array([21, 22], dtype=np.uint64))
    assert one.translate(ring((1, 21))) == [
        BlockStored([21], None, [100, 101], T),
        BlockRemoved([1 << 63, 11]),
    ]


def test_the_callers_arrays_may_change() -> None:
    tokens, path = TOKENS.copy(), PATH.copy()
    one = EventTracker(T)
    one.remember(tokens, path)
    tokens[:] = -1
    path[:] = 0
    assert one.translate(ring((1, 1 << 63))) == [BlockStored([1 << 63], None, [0, 1], T)]
