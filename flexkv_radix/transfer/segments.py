"""Where the bytes of a block are: in the tensors of one rank, and in a slot.  Pure.

A block is cut into segments.  Block b of segment s is

    engine   tensors[s.tensor] + s.base_bytes + b * s.block_stride_bytes     s.num_bytes long
    slot     slot              + s.slot_offset_bytes                         s.num_bytes long

so that LAYERFIRST has a segment per (layer, K/V), LAYERBLOCK one per layer, and BLOCKFIRST one per
layer that `coalesce` joins into one whenever layers need not be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Segment:
    """One run of bytes of every block (the module's comment says where it lies)."""

    layer: int  # position in the order of layerwise transfers, from 0
    tensor: int  # index into the part's tensors
    base_bytes: int
    block_stride_bytes: int
    num_bytes: int
    slot_offset_bytes: int


def coalesce(segments: Iterable[Segment]) -> list[Segment]:
    """Join segments that follow each other both in engine memory and in the slot.

    The result moves the same bytes; its `layer` is that of the first segment joined.
    """
    joined: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.slot_offset_bytes):
        if joined and _follows(joined[-1], segment):
            joined[-1] = replace(joined[-1], num_bytes=joined[-1].num_bytes + segment.num_bytes)
        else:
            joined.append(segment)
    return joined


def _follows(first: Segment, second: Segment) -> bool:
    return (
        first.tensor == second.tensor
        and first.block_stride_bytes == second.block_stride_bytes
        and first.base_bytes + first.num_bytes == second.base_bytes
        and first.slot_offset_bytes + first.num_bytes == second.slot_offset_bytes
    )


def by_layer(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Segments of each layer in order, joined where possible; layers without segments are left out."""
    layers: dict[int, list[Segment]] = {}
    for segment in segments:
        layers.setdefault(segment.layer, []).append(segment)
    return [coalesce(layers[layer]) for layer in sorted(layers)]


def check_segments(
    segments: Sequence[Segment], num_blocks: int, tensor_bytes: Sequence[int], slot_bytes: int
) -> None:
    """Raise ValueError unless every byte of every block lies inside its tensor and its slot."""
    if not segments:
        raise ValueError("segments: a part needs at least one")
    if num_blocks < 1:
        raise ValueError(f"num_blocks: {num_blocks} is not positive")
    for index, s in enumerate(segments):
        if not 0 <= s.tensor < len(tensor_bytes):
            raise ValueError(
                f"segments[{index}].tensor: {s.tensor} is not one of {len(tensor_bytes)} tensors"
            )
        if min(s.layer, s.base_bytes, s.slot_offset_bytes) < 0 or s.num_bytes < 1:
            raise ValueError(f"segments[{index}]: negative or empty: {s}")
        if s.block_stride_bytes < s.num_bytes:
            raise ValueError(
                f"segments[{index}]: blocks overlap: stride {s.block_stride_bytes} < {s.num_bytes} bytes"
            )
        end_bytes = s.base_bytes + (num_blocks - 1) * s.block_stride_bytes + s.num_bytes
        if end_bytes > tensor_bytes[s.tensor]:
            raise ValueError(
                f"segments[{index}]: block {num_blocks - 1} ends at byte {end_bytes} of a tensor of "
                f"{tensor_bytes[s.tensor]} bytes"
            )
        if s.slot_offset_bytes + s.num_bytes > slot_bytes:
            raise ValueError(
                f"segments[{index}]: ends at byte {s.slot_offset_bytes + s.num_bytes}"
                f" of a slot of {slot_bytes} bytes"
            )


def check_cover(parts: Sequence[Sequence[Segment]], slot_bytes: int) -> None:
    """Raise ValueError unless the ranks' segments cover each of the slot's bytes exactly once.

    Stored blocks are published whole, so a gap would publish bytes that nobody wrote.
    """
    position = 0
    for s in sorted((s for part in parts for s in part), key=lambda s: s.slot_offset_bytes):
        if s.slot_offset_bytes != position:
            what = "written twice" if s.slot_offset_bytes < position else "written by no rank"
            raise ValueError(f"slot bytes {min(position, s.slot_offset_bytes)}.. are {what}")
        position += s.num_bytes
    if position != slot_bytes:
        raise ValueError(f"slot bytes {position}..{slot_bytes} are written by no rank")
