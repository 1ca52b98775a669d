"""From tokens to blocks and back: what callers pass per token, the index and the planner need per block."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flexkv_radix.planner import Blocks

Tokens = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_INT64 = np.dtype(np.int64)


def as_tokens(name: str, values: Any) -> Tokens:
    """1-D contiguous int64 array of an array, list or torch tensor (on any device); copied only if need be.

    Raises TypeError for anything but integers, ValueError for another number of dimensions.
    """
    if (
        type(values) is np.ndarray
        and values.dtype is _INT64
        and values.ndim == 1
        and values.flags.c_contiguous
    ):
        return values
    array = _as_array(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: integers expected, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name}: one dimension expected, not {array.ndim}")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_mask(token_mask: Any, num_tokens: int) -> Mask | None:
    """token_mask as a bool array of num_tokens, never written to; None stays None (all True)."""
    if token_mask is None:
        return None
    mask = _as_array(token_mask)
    if mask.dtype != np.bool_ and mask.size:  # an empty list has no type
        raise TypeError(f"token_mask: bool expected, not {mask.dtype}")
    if mask.shape != (num_tokens,):
        raise ValueError(f"token_mask: shape {mask.shape} does not fit {num_tokens} tokens")
    return mask.astype(np.bool_, copy=False)


def _as_array(values: Any) -> npt.NDArray[Any]:
    if hasattr(values, "detach"):  # a torch tensor, without importing torch for it
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def wanted_blocks(mask: Mask | None, tokens_per_block: int, num_blocks: int) -> Blocks:
    """Blocks of the first num_blocks all of whose tokens are wanted."""
    if mask is None:
        return Blocks(0, num_blocks)
    end = num_blocks * tokens_per_block
    first = int(mask[:end].argmax()) if end else 0
    if end == 0 or not mask[first]:
        return Blocks(0, 0)
    if np.count_nonzero(mask[first:end]) == end - first:  # usual: a prefix is there, the rest is wanted
        return Blocks(-(-first // tokens_per_block), num_blocks)
    whole = mask[:end].reshape(num_blocks, tokens_per_block).all(axis=1)
    return Blocks.of(np.flatnonzero(whole))


def token_mask_of(blocks: Blocks, tokens_per_block: int, num_tokens: int) -> Mask:
    """Mask of num_tokens that is True for the tokens of blocks."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    if blocks.ids is None:
        mask[blocks.start * tokens_per_block : blocks.end * tokens_per_block] = True
    else:
        rows = mask[: num_tokens // tokens_per_block * tokens_per_block].reshape(-1, tokens_per_block)
        rows[blocks.ids] = True
    return mask


def gpu_blocks_of(name: str, slot_mapping: Any, tokens_per_block: int) -> npt.NDArray[np.int64]:
    """Ids of the engine's blocks behind a slot per token.

    Raises ValueError unless the slots are whole, aligned blocks.
    """
    slots = as_tokens(name, slot_mapping)
    if len(slots) % tokens_per_block:
        raise ValueError(f"{name}: {len(slots)} slots are not whole blocks of {tokens_per_block} tokens")
    blocks, offsets = np.divmod(slots[::tokens_per_block], tokens_per_block)
    if offsets.any() or (blocks < 0).any():
        raise ValueError(
            f"{name}: a block does not start at a multiple of {tokens_per_block}, or is negative"
        )
    return blocks
