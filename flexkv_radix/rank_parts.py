"""From a rank's tensors and layouts to what it registers for each component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexkv_radix.layout import BlockLayout, KVCacheLayout
from flexkv_radix.transfer.protocol import RankPart, TensorView
from flexkv_radix.transfer.segments import Segment
from radixshmem import ComponentType

Group = tuple[list[torch.Tensor], BlockLayout]


def groups_of(name: str, tensors: Any, layout: BlockLayout | Sequence[BlockLayout]) -> list[Group]:
    """Tensors paired with their layouts.  name: the argument, for errors."""
    if isinstance(layout, Sequence):
        if len(tensors) != len(layout):
            raise ValueError(f"{name}: {len(tensors)} lists of tensors given for {len(layout)} layouts")
        return [
            group for one, its in zip(tensors, layout, strict=True) for group in groups_of(name, one, its)
        ]
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not listed:
        raise ValueError(f"{name}: no tensors given")
    if isinstance(layout, KVCacheLayout) and not all(tensor.is_contiguous() for tensor in listed):
        raise ValueError(f"{name}: a tensor is not contiguous; describe its blocks by an OpaqueBlockLayout")
    return [(listed, layout)]


def rank_parts(
    groups: Mapping[ComponentType, Sequence[Group]], views: Sequence[TensorView]
) -> tuple[RankPart, ...]:
    """A part for each component; views are those of all groups' tensors, in order.

    Layers are numbered through: those of the second component follow those of the first.
    """
    parts: list[RankPart] = []
    first_view, first_layer = 0, 0
    for component, its_groups in groups.items():
        num_tensors = sum(len(tensors) for tensors, _ in its_groups)
        its_views = tuple(views[first_view : first_view + num_tensors])
        parts.append(_part(component, its_groups, its_views, first_layer))
        first_view += num_tensors
        first_layer = 1 + max(segment.layer for segment in parts[-1].segments)
    return tuple(parts)


def _part(
    component: ComponentType, groups: Sequence[Group], views: tuple[TensorView, ...], first_layer: int
) -> RankPart:
    replicated = {layout.is_replicated for _, layout in groups}
    if len(replicated) > 1:
        raise ValueError(f"{component.name}: some groups of layers are replicas and some are not")
    return RankPart(
        component,
        num_blocks=min(layout.num_block for _, layout in groups),
        tensors=views,
        segments=_joined_segments(groups, first_layer),
        replicated=replicated.pop(),
    )


def _joined_segments(groups: Sequence[Group], first_layer_of_all: int) -> tuple[Segment, ...]:
    """Segments of all groups, one group after the other in the share.

    Groups with as many layers as the first are more of the same layers; others follow in order.
    """
    joined: list[Segment] = []
    first_tensor, offset_bytes, num_layers = 0, 0, 0
    for tensors, layout in groups:
        segments = layout.segments(len(tensors), tensors[0].element_size())
        first_layer = 0 if layout.num_layer == groups[0][1].num_layer else num_layers
        joined += [
            replace(
                segment,
                layer=segment.layer + first_layer_of_all + first_layer,
                tensor=segment.tensor + first_tensor,
                slot_offset_bytes=segment.slot_offset_bytes + offset_bytes,
            )
            for segment in segments
        ]
        first_tensor += len(tensors)
        offset_bytes += layout.block_bytes(tensors[0].element_size())
        num_layers = max(num_layers, first_layer + layout.num_layer)
    return tuple(joined)
