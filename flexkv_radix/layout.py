"""How an engine's KV tensors are laid out, and where each block's bytes go in a host slot.  Pure.

    LAYERFIRST   [L, kv, B, T, H, D]     L layers, kv = 2 (K and V) or 1 (MLA), B blocks of
    BLOCKFIRST   [B, L, kv, T, H, D]     T tokens, H heads, D elements a head
    LAYERBLOCK   [L, B, kv, T, H, D]
    opaque       every layer's block is a run of bytes (OpaqueBlockLayout)

A layout says what *one rank* holds.  It may come as one tensor, or cut along its outer dimensions:
one tensor per layer, or (LAYERFIRST) one per layer and K/V, all K tensors first.

A host slot is BLOCKFIRST: one block, all layers, contiguous.  The share of each rank lies in it as
[L, kv, T, H, D] of that rank (placement.py puts the shares one after the other), so no transfer ever
cuts a run of the engine's memory into pieces.  Models with several KV shapes have one layout per
group of layers; the groups follow each other in the share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from flexkv_radix.transfer.segments import Segment

MAX_SLOT_ALIGN = 4096  # a page: what direct I/O and huge-page mappings could ask for, and no more


class KVCacheLayoutType(Enum):
    """Order of the dimensions of KV tensors."""

    LAYERFIRST = "LAYERFIRST"
    BLOCKFIRST = "BLOCKFIRST"
    LAYERBLOCK = "LAYERBLOCK"


class BlockLayout(Protocol):
    """What transfers need to know of a layout."""

    @property
    def num_layer(self) -> int: ...

    @property
    def num_block(self) -> int: ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def is_replicated(self) -> bool:
        """Whether all tensor-parallel ranks hold the same bytes."""

    def block_bytes(self, itemsize: int) -> int:
        """Bytes of one block, all layers of this rank."""

    def segments(self, num_tensors: int, itemsize: int) -> list[Segment]:
        """Runs of bytes of a block, offsets relative to this layout's first byte in the slot."""


@dataclass
class KVCacheLayout:
    """Shape of one rank's KV tensors, in elements.

    kv_dim: 2 for separate K and V, 1 where they are one (MLA); `is_mla=True` is another way to say 1, and
    reads True whenever kv_dim is 1.
    replicated: all ranks of a tensor-parallel group hold the same bytes; by default so iff kv_dim is 1.
    """

    type: KVCacheLayoutType
    num_layer: int
    num_block: int
    tokens_per_block: int
    num_head: int
    head_size: int
    kv_dim: int = 2
    is_mla: bool = False
    replicated: bool | None = None

    def __post_init__(self) -> None:
        if self.is_mla:
            self.kv_dim = 1
        if self.kv_dim not in (1, 2):
            raise ValueError(f"kv_dim: {self.kv_dim} is neither 1 nor 2")
        self.is_mla = self.kv_dim == 1
        for name in ("num_layer", "num_block", "tokens_per_block", "num_head", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")

    @property
    def is_replicated(self) -> bool:
        return self.kv_dim == 1 if self.replicated is None else self.replicated

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Dimensions of the whole as one tensor."""
        inner = (self.tokens_per_block, self.num_head, self.head_size)
        outer = {
            KVCacheLayoutType.LAYERFIRST: (self.num_layer, self.kv_dim, self.num_block),
            KVCacheLayoutType.BLOCKFIRST: (self.num_block, self.num_layer, self.kv_dim),
            KVCacheLayoutType.LAYERBLOCK: (self.num_layer, self.num_block, self.kv_dim),
        }[self.type]
        return (*outer, *inner)

    @property
    def chunk_size(self) -> int:
        """Elements of one layer's K (or V) of one block: the run that is contiguous in every layout."""
        return self.tokens_per_block * self.num_head * self.head_size

    def block_bytes(self, itemsize: int) -> int:
        """Bytes of one block, all layers, elements of itemsize bytes."""
        return self.num_layer * self.kv_dim * self.chunk_size * itemsize

    def allowed_num_tensors(self) -> set[int]:
        """In how many tensors this layout may come."""
        if self.type is KVCacheLayoutType.BLOCKFIRST:
            return {1}
        if self.type is KVCacheLayoutType.LAYERBLOCK:
            return {1, self.num_layer}
        return {1, self.num_layer, self.num_layer * self.kv_dim}

    def segments(self, num_tensors: int, itemsize: int) -> list[Segment]:
        """One segment per (layer, K/V), in slot order.

        Raises ValueError if the layout cannot come in num_tensors tensors.
        """
        if num_tensors not in self.allowed_num_tensors():
            expected = " or ".join(str(n) for n in sorted(self.allowed_num_tensors()))
            raise ValueError(
                f"kv_caches: {num_tensors} tensors given, a {self.type.value} layout has {expected}"
            )
        chunk_bytes = self.chunk_size * itemsize
        return [
            self._segment(layer, kv, num_tensors, chunk_bytes)
            for layer in range(self.num_layer)
            for kv in range(self.kv_dim)
        ]

    def _segment(self, layer: int, kv: int, num_tensors: int, chunk_bytes: int) -> Segment:
        layer_stride, kv_stride, block_stride = self._strides_chunks()
        if num_tensors == 1:
            tensor, base = 0, layer * layer_stride + kv * kv_stride
        elif num_tensors == self.num_layer:
            tensor, base = layer, kv * kv_stride
        else:
            tensor, base = kv * self.num_layer + layer, 0
        return Segment(
            layer=layer,
            tensor=tensor,
            base_bytes=base * chunk_bytes,
            block_stride_bytes=block_stride * chunk_bytes,
            num_bytes=chunk_bytes,
            slot_offset_bytes=(layer * self.kv_dim + kv) * chunk_bytes,
        )

    def _strides_chunks(self) -> tuple[int, int, int]:
        """Strides of layer, K/V and block, in chunks."""
        if self.type is KVCacheLayoutType.LAYERFIRST:
            return self.kv_dim * self.num_block, self.num_block, 1
        if self.type is KVCacheLayoutType.BLOCKFIRST:
            return self.kv_dim, 1, self.num_layer * self.kv_dim
        return self.num_block * self.kv_dim, 1, self.kv_dim


@dataclass
class OpaqueBlockLayout:
    """Blocks as runs of bytes: for engines whose block has an order of its own.

    Block b of layer l is `bytes_per_layer` bytes at b * block_stride_bytes of tensor l, or with one
    tensor for all layers at l * layer_stride_bytes + b * block_stride_bytes of that.
    """

    num_layer: int
    num_block: int
    tokens_per_block: int
    bytes_per_layer: int
    block_stride_bytes: int
    layer_stride_bytes: int = 0
    replicated: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layer", "num_block", "tokens_per_block", "bytes_per_layer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        if self.block_stride_bytes < self.bytes_per_layer:
            raise ValueError(
                f"block_stride_bytes: {self.block_stride_bytes} is less than the {self.bytes_per_layer} "
                "bytes of a block, so blocks would overlap"
            )

    @property
    def is_replicated(self) -> bool:
        return self.replicated

    def block_bytes(self, itemsize: int) -> int:
        """Bytes of one block, all layers; itemsize does not matter."""
        return self.num_layer * self.bytes_per_layer

    def segments(self, num_tensors: int, itemsize: int) -> list[Segment]:
        """One segment per layer, in slot order.

        Raises ValueError unless there is one tensor per layer, or one with a layer stride.
        """
        one_for_all = num_tensors == 1 and self.num_layer > 1
        if num_tensors != self.num_layer and not one_for_all:
            raise ValueError(f"kv_caches: {num_tensors} tensors given, the layout has {self.num_layer} or 1")
        if one_for_all and self.layer_stride_bytes < self.bytes_per_layer:
            raise ValueError(
                f"layer_stride_bytes: {self.layer_stride_bytes} does not tell layers of "
                f"{self.bytes_per_layer} bytes apart within one tensor"
            )
        return [
            Segment(
                layer=layer,
                tensor=0 if one_for_all else layer,
                base_bytes=layer * self.layer_stride_bytes if one_for_all else 0,
                block_stride_bytes=self.block_stride_bytes,
                num_bytes=self.bytes_per_layer,
                slot_offset_bytes=layer * self.bytes_per_layer,
            )
            for layer in range(self.num_layer)
        ]


@dataclass(frozen=True)
class LayerGroupSpec:
    """Layers of one model that share a KV shape, per rank; sizes in elements of itemsize bytes."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    kv_dim: int = 2
    itemsize: int = 2
    tokens_per_entry: int = 1  # tokens that one stored entry stands for (compressed KV); divides the block

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one block of this group."""
        if tokens_per_block % self.tokens_per_entry:
            raise ValueError(f"tokens_per_entry: {self.tokens_per_entry} does not divide {tokens_per_block}")
        entries = tokens_per_block // self.tokens_per_entry
        return self.num_layers * self.kv_dim * entries * self.num_kv_heads * self.head_size * self.itemsize

    def layout(self, kind: KVCacheLayoutType, num_block: int, tokens_per_block: int) -> KVCacheLayout:
        """Layout of this group's tensors in an engine with num_block blocks."""
        entries = tokens_per_block // self.tokens_per_entry
        return KVCacheLayout(
            kind, self.num_layers, num_block, entries, self.num_kv_heads, self.head_size, kv_dim=self.kv_dim
        )


def common_slot_align(slot_bytes: Sequence[int]) -> int:
    """Largest power of two <= 4096 that divides every pool's slot bytes, so that stride = block bytes."""
    align = MAX_SLOT_ALIGN
    for num_bytes in slot_bytes:
        if num_bytes < 0:
            raise ValueError(f"slot_bytes: {num_bytes} is negative")
        while num_bytes % align:
            align //= 2
    return align
