"""Where each rank's share lies in a slot, and which ranks store it.  Pure.

    slot   | stage 0, rank 0 | stage 0, rank 1 | ... | stage 1, rank 0 | ...

A rank does not know the sizes of the others, so it registers offsets relative to its own share; the
transfer worker places the shares once all ranks have registered.  Ranks of a pipeline stage that hold
replicas (MLA under tensor parallelism) have one share in common: the first stores it, all load it.
Only the order of (pp_rank, tp_rank) counts, so engines on other devices place alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from flexkv_radix.transfer.protocol import RankPart, RegisterRank
from radixshmem.geometry import ComponentType


def place_ranks(ranks: Sequence[RegisterRank]) -> list[RegisterRank]:
    """The same registrations ordered by place, with slot offsets absolute and replicas marked.

    Raises ValueError if two ranks have the same place or ranks of a stage disagree on being replicas.
    """
    ordered = sorted(ranks, key=lambda r: (r.place.pp_rank, r.place.tp_rank))
    for first, second in pairwise(ordered):
        if first.place == second.place:
            raise ValueError(
                f"two ranks registered as {first.place}: give each its own device_id or intra_client_id"
            )
    for component in ComponentType:
        ordered = _place_component(ordered, component)
    return ordered


def _place_component(ranks: list[RegisterRank], component: ComponentType) -> list[RegisterRank]:
    next_bytes = 0
    stage_of_replica: int | None = None
    replica_bytes = 0
    placed = []
    for rank in ranks:
        parts = []
        for part in rank.parts:
            if part.component is not component:
                parts.append(part)
                continue
            if part.replicated and stage_of_replica == rank.place.pp_rank:
                if part.share_bytes != replica_bytes:
                    raise ValueError(
                        f"{rank.place}: a replica of {part.share_bytes} bytes, the first has {replica_bytes}"
                    )
                parts.append(_moved(part, next_bytes - replica_bytes, stores=False))
                continue
            parts.append(_moved(part, next_bytes, stores=True))
            next_bytes += part.share_bytes
            stage_of_replica = rank.place.pp_rank if part.replicated else None
            replica_bytes = part.share_bytes
        placed.append(replace(rank, parts=tuple(parts)))
    return placed


def _moved(part: RankPart, by_bytes: int, *, stores: bool) -> RankPart:
    segments = tuple(replace(s, slot_offset_bytes=s.slot_offset_bytes + by_bytes) for s in part.segments)
    return replace(part, segments=segments, stores=stores)
