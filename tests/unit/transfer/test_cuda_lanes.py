"""A rank's blocks shared among streams: layers are announced when every stream is past them."""

from __future__ import annotations

import os
import select
from types import SimpleNamespace

import numpy as np
import pytest

from flexkv_radix.transfer.cuda import _Launched, _shares
from flexkv_radix.transfer.cuda_driver import CudaError
from flexkv_radix.transfer.cuda_plans import MIN_COPIES_A_LANE, RankPlan
from flexkv_radix.transfer.protocol import OpKind, RankPlace, TransferOp
from radixshmem import ComponentType


class Lane:
    """A stream that gets on by a given number of stages with every look."""

    def __init__(self, num_stages: int, steps: list[int], error: CudaError | None = None) -> None:
        self.num_over = 0
        self.error: CudaError | None = None
        self._num_stages = num_stages
        self._steps = steps
        self._error = error

    def is_over(self) -> bool:
        self.num_over += self._steps.pop(0) if self._steps else 0
        if not self._steps and self._error is not None:
            self.error = self._error
            return True
        return self.num_over == self._num_stages

    def give_back_scratch(self) -> None:
        assert self.num_over == self._num_stages


def plan_of(layers: list[list[int]], copies_a_block: int = 0) -> RankPlan:
    return RankPlan(SimpleNamespace(), RankPlace(), layers, [], copies_a_block)  # type: ignore[arg-type]


def launched(layers: list[list[int]], lanes: list[Lane], fds: list[int] | None = None) -> _Launched:
    return _Launched(plan_of(layers), lanes, fds)  # type: ignore[arg-type]


def signalled(fds: list[int]) -> list[int]:
    return [number for number, fd in enumerate(fds) if select.select([fd], [], [], 0)[0]]


@pytest.fixture
def fds():
    made = [os.eventfd(0) for _ in range(4)]
    yield made
    for fd in made:
        os.close(fd)


def test_a_layer_is_announced_when_all_lanes_are_past_it(fds: list[int]) -> None:
    share = launched([[0], [1, 2], [3]], [Lane(3, [2, 0, 1]), Lane(3, [0, 1, 2])], fds)
    assert not share.is_over()
    assert signalled(fds) == []
    assert not share.is_over()
    assert signalled(fds) == [0]
    assert share.is_over()
    assert signalled(fds) == [0, 1, 2, 3]
    assert {os.eventfd_read(fd) for fd in fds} == {1}, "each once"


def test_an_error_of_one_lane_waits_for_the_other_and_announces_nothing_more(fds: list[int]) -> None:
    failing = Lane(3, [1, 1], CudaError("copy", "CUDA_ERROR_X"))
    share = launched([[0], [1], [2, 3]], [Lane(3, [1, 0, 2]), failing], fds)
    assert [share.is_over() for _ in range(3)] == [False, False, True]
    assert signalled(fds) == [0]
    assert share.error is not None


@pytest.mark.parametrize(("n", "num_lanes"), [(1, 1), (7, 2), (7, 3), (64, 3), (5, 5)])
def test_shares_are_the_ops_blocks_in_order(n: int, num_lanes: int) -> None:
    rng = np.random.default_rng(1)
    blocks, slots = rng.permutation(n), rng.permutation(n).astype(np.int32)
    op = TransferOp(5, OpKind.H2D, ComponentType.FULL, blocks, slots, layerwise=True, counter_id=2)
    shares = _shares(op, min(num_lanes, n))
    assert len(shares) == min(num_lanes, n)
    assert np.array_equal(np.concatenate([share.gpu_blocks for share in shares]), blocks)
    assert np.array_equal(np.concatenate([share.slots for share in shares]), slots)
    assert {(share.op_id, share.layerwise, share.counter_id) for share in shares} == {(5, True, 2)}


def test_only_many_copies_are_shared_among_lanes() -> None:
    rows, batch = plan_of([[0]]), plan_of([[0]], copies_a_block=72)
    assert rows.num_lanes(1000, 4) == 1
    assert batch.num_lanes(1, 4) == 1
    assert batch.num_lanes(-(-3 * MIN_COPIES_A_LANE // 72), 4) == 3
    assert batch.num_lanes(1000, 4) == 4


def test_no_lane_is_without_a_block() -> None:
    assert plan_of([[0]], copies_a_block=10 * MIN_COPIES_A_LANE).num_lanes(2, 4) == 2
