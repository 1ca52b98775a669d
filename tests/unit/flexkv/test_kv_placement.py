"""Shares of ranks in a slot."""

from __future__ import annotations

import itertools

import pytest

from flexkv_radix.placement import place_ranks
from flexkv_radix.transfer.protocol import RankPart, RankPlace, RegisterRank, TensorView
from flexkv_radix.transfer.segments import Segment, check_cover
from radixshmem import ComponentType

FULL, SWA = ComponentType.FULL, ComponentType.SWA


def rank(pp: int, tp: int, num_bytes: int, *, replicated: bool = False, swa_bytes: int = 0) -> RegisterRank:
    parts = [part(FULL, num_bytes, replicated)] + ([part(SWA, swa_bytes, replicated)] if swa_bytes else [])
    return RegisterRank(RankPlace(0, pp, tp), (), tuple(parts))


def part(component: ComponentType, num_bytes: int, replicated: bool) -> RankPart:
    half = num_bytes // 2
    segments = (Segment(0, 0, 0, half, half, 0), Segment(1, 0, 0, num_bytes - half, num_bytes - half, half))
    return RankPart(component, 1, (TensorView(0, 0, num_bytes),), segments, replicated)


def shares(ranks: list[RegisterRank], component: ComponentType = FULL) -> list[tuple[int, bool]]:
    parts = [part for rank in ranks for part in rank.parts if part.component is component]
    return [(part.segments[0].slot_offset_bytes, part.stores) for part in parts]


def test_ranks_follow_each_other_by_stage_and_rank() -> None:
    ranks = [rank(0, 5, 10), rank(0, 9, 10), rank(1, 5, 6), rank(1, 9, 6)]
    for order in itertools.permutations(ranks):
        placed = place_ranks(order)
        assert shares(placed) == [(0, True), (10, True), (20, True), (26, True)]
        check_cover([part.segments for rank in placed for part in rank.parts], 32)


def test_replicas_have_one_share_that_one_of_them_stores() -> None:
    placed = place_ranks([rank(pp, tp, 10, replicated=True) for tp in (2, 0, 1) for pp in (1, 0)])
    assert shares(placed) == [(0, True), (0, False), (0, False), (10, True), (10, False), (10, False)]


def test_components_are_placed_apart() -> None:
    placed = place_ranks([rank(0, 0, 10, swa_bytes=4), rank(0, 1, 10, swa_bytes=4)])
    assert shares(placed) == [(0, True), (10, True)]
    assert shares(placed, SWA) == [(0, True), (4, True)]


def test_a_place_taken_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="device_id"):
        place_ranks([rank(0, 0, 10), rank(0, 0, 10)])


def test_replicas_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="replica of 12"):
        place_ranks([rank(0, 0, 10, replicated=True), rank(0, 1, 12, replicated=True)])
