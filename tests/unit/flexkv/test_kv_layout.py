"""Layouts against plain indexing of tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flexkv_radix.layout import (
    KVCacheLayout,
    KVCacheLayoutType,
    LayerGroupSpec,
    OpaqueBlockLayout,
    common_slot_align,
)

L, B, T, H, D = 3, 5, 4, 2, 6
KINDS = list(KVCacheLayoutType)


def whole(layout: KVCacheLayout) -> np.ndarray:
    return np.arange(np.prod(layout.kv_shape), dtype=np.uint16).reshape(layout.kv_shape)


def cut(kv: np.ndarray, layout: KVCacheLayout, num_tensors: int) -> list[np.ndarray]:
    """kv as an engine would hand it over in num_tensors."""
    if num_tensors == 1:
        return [kv]
    if num_tensors == layout.num_layer:
        return list(kv)
    return [kv[layer, half] for half in range(layout.kv_dim) for layer in range(layout.num_layer)]


def block_of(kv: np.ndarray, layout: KVCacheLayout, block: int) -> np.ndarray:
    """[L, kv, T, H, D] of one block."""
    if layout.type is KVCacheLayoutType.LAYERFIRST:
        return kv[:, :, block]
    if layout.type is KVCacheLayoutType.BLOCKFIRST:
        return kv[block]
    return kv[:, block]


def gather(tensors: list[np.ndarray], segments, block: int, slot_bytes: int) -> np.ndarray:
    slot = np.zeros(slot_bytes, dtype=np.uint8)
    for s in segments:
        source = np.ascontiguousarray(tensors[s.tensor]).view(np.uint8).reshape(-1)
        start = s.base_bytes + block * s.block_stride_bytes
        slot[s.slot_offset_bytes : s.slot_offset_bytes + s.num_bytes] = source[start : start + s.num_bytes]
    return slot


@pytest.mark.parametrize(("kind", "kv_dim"), list(itertools.product(KINDS, (1, 2))))
def test_segments_find_every_byte_of_every_block(kind: KVCacheLayoutType, kv_dim: int) -> None:
    layout = KVCacheLayout(kind, L, B, T, H, D, kv_dim)
    kv = whole(layout)
    for num_tensors in layout.allowed_num_tensors():
        segments = layout.segments(num_tensors, 2)
        assert len(segments) == L * kv_dim
        for block in range(B):
            slot = gather(cut(kv, layout, num_tensors), segments, block, layout.block_bytes(2))
            assert np.array_equal(slot, block_of(kv, layout, block).copy().view(np.uint8).reshape(-1))


@pytest.mark.parametrize(("kind", "wrong"), [(KINDS[0], 2), (KINDS[1], L), (KINDS[2], 2 * L)])
def test_other_numbers_of_tensors_are_refused(kind: KVCacheLayoutType, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"{wrong} tensors given"):
        KVCacheLayout(kind, L, B, T, H, D).segments(wrong, 2)


def test_mla_is_one_replicated_half() -> None:
    layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, L, B, T, 1, D, is_mla=True)
    assert (layout.kv_dim, layout.is_mla, layout.is_replicated) == (1, True, True)
    assert KVCacheLayout(KVCacheLayoutType.LAYERFIRST, L, B, T, 1, D, kv_dim=1).is_mla
    assert not KVCacheLayout(KVCacheLayoutType.LAYERFIRST, L, B, T, 1, D).is_mla
    assert not KVCacheLayout(
        KVCacheLayoutType.LAYERFIRST, L, B, T, 1, D, kv_dim=1, replicated=False
    ).is_replicated


@pytest.mark.parametrize("name", ["num_layer", "num_block", "tokens_per_block", "num_head", "head_size"])
def test_sizes_are_positive(name: str) -> None:
    sizes = {"num_layer": L, "num_block": B, "tokens_per_block": T, "num_head": H, "head_size": D, name: 0}
    with pytest.raises(ValueError, match=name):
        KVCacheLayout(KVCacheLayoutType.LAYERFIRST, **sizes)


def test_opaque_blocks_in_one_storage_and_in_several() -> None:
    layout = OpaqueBlockLayout(L, B, T, bytes_per_layer=10, block_stride_bytes=12, layer_stride_bytes=70)
    storage = np.arange(L * 70, dtype=np.uint8)
    for block in range(B):
        expected = np.concatenate([storage[n * 70 + block * 12 :][:10] for n in range(L)])
        one = gather([storage], layout.segments(1, 2), block, layout.block_bytes(2))
        several = gather([storage[n * 70 : (n + 1) * 70] for n in range(L)], layout.segments(L, 1), block, 30)
        assert np.array_equal(one, expected)
        assert np.array_equal(several, expected)


def test_opaque_layouts_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        OpaqueBlockLayout(L, B, T, 10, 9)
    with pytest.raises(ValueError, match="layer_stride_bytes"):
        OpaqueBlockLayout(L, B, T, 10, 10).segments(1, 1)
    with pytest.raises(ValueError, match="2 tensors"):
        OpaqueBlockLayout(L, B, T, 10, 10).segments(2, 1)


def test_layer_groups() -> None:
    spec = LayerGroupSpec(2, num_kv_heads=3, head_size=5, itemsize=4, tokens_per_entry=4)
    assert spec.block_bytes(16) == 2 * 2 * 4 * 3 * 5 * 4
    assert spec.layout(KVCacheLayoutType.LAYERFIRST, B, 16).block_bytes(4) == spec.block_bytes(16)
    with pytest.raises(ValueError, match="tokens_per_entry"):
        spec.block_bytes(6)


@pytest.mark.parametrize(
    ("slot_bytes", "align"),
    [([4096], 4096), ([2359296, 0], 4096), ([1001], 1), ([1024, 768], 256), ([6], 2), ([8192, 12], 4)],
)
def test_alignment_leaves_no_padding(slot_bytes: list[int], align: int) -> None:
    assert common_slot_align(slot_bytes) == align
