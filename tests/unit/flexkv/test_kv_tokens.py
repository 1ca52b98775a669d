"""Tokens to blocks and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexkv_radix.planner import Blocks
from flexkv_radix.tokens import as_mask, as_tokens, gpu_blocks_of, token_mask_of, wanted_blocks

T = 4


@pytest.mark.parametrize(
    "given_tokens",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 9, 2, 9, 3])[::2], torch.tensor([1, 2, 3]),
     torch.tensor([1, 2, 3], dtype=torch.int32), np.array([1, 2, 3], dtype=np.uint16)],
)  # fmt: skip
def test_tokens_of_any_kind(given_tokens: object) -> None:
    tokens = as_tokens("token_ids", given_tokens)
    assert tokens.tolist() == [1, 2, 3]
    assert tokens.dtype == np.int64
    assert tokens.flags.c_contiguous


def test_no_copy_is_made_of_what_fits() -> None:
    tokens = np.arange(5)
    assert as_tokens("token_ids", tokens) is tokens


@pytest.mark.parametrize("wrong", [np.array([1.0]), np.array([True]), ["a"]])
def test_only_integers_are_tokens(wrong: object) -> None:
    with pytest.raises(TypeError, match="token_ids"):
        as_tokens("token_ids", wrong)


def test_masks() -> None:
    mask = np.array([True, False])
    assert as_mask(None, 2) is None
    assert as_mask(mask, 2) is mask
    assert as_mask(torch.tensor([True, False]), 2).tolist() == [True, False]
    with pytest.raises(ValueError, match="token_mask"):
        as_mask(mask, 3)
    with pytest.raises(TypeError, match="token_mask"):
        as_mask(np.array([1, 0]), 2)


@given(st.lists(st.booleans(), max_size=40))
def test_a_block_is_wanted_if_all_its_tokens_are(flags: list[bool]) -> None:
    mask = np.array(flags, dtype=bool)
    kept = mask.copy()
    num_blocks = len(flags) // T
    expected = [b for b in range(num_blocks) if all(flags[b * T : (b + 1) * T])]
    blocks = wanted_blocks(mask, T, num_blocks)
    assert len(blocks) == len(expected)
    moved = token_mask_of(blocks, T, len(flags))
    assert np.flatnonzero(moved).tolist() == [b * T + i for b in expected for i in range(T)]
    assert (mask == kept).all()


def test_no_mask_wants_all_whole_blocks() -> None:
    assert wanted_blocks(None, T, 3) == Blocks(0, 3)


def test_slot_mappings() -> None:
    assert gpu_blocks_of("slot_mapping", np.r_[8:12, 0:4], T).tolist() == [2, 0]
    assert gpu_blocks_of("slot_mapping", [], T).tolist() == []
    for wrong in (np.arange(1, 5), np.arange(-4, 0), np.arange(3)):
        with pytest.raises(ValueError, match="slot_mapping"):
            gpu_blocks_of("slot_mapping", wrong, T)
