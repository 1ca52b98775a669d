"""An op of several GPUs fails only when no GPU works on it any more."""

from __future__ import annotations

import pytest

from flexkv_radix.transfer.cuda import _Transfer
from flexkv_radix.transfer.cuda_driver import CudaError


class Share:
    """A rank's share that is over after some looks."""

    def __init__(self, num_looks: int, error: CudaError | None = None) -> None:
        self.num_looks = num_looks
        self.error = error

    def is_over(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0


def test_done_when_all_are() -> None:
    transfer = _Transfer([Share(0), Share(2)])  # type: ignore[list-item]
    assert [transfer.is_done() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_waits_for_the_others(order: int) -> None:
    shares = [Share(0, CudaError("copy", "CUDA_ERROR_X")), Share(3)]
    transfer = _Transfer(shares[::order])  # type: ignore[arg-type]
    assert [transfer.is_done() for _ in range(3)] == [False, False, False]
    with pytest.raises(CudaError, match="CUDA_ERROR_X"):
        transfer.is_done()


def test_an_op_without_blocks_is_done_at_once() -> None:
    assert _Transfer([]).is_done()
