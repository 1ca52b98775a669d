"""Agreement of the ranks of one engine.

Only the leader (rank 0 of every axis) asks the cache; what it decides is handed from stage to stage, then
over the context-parallel and last the tensor-parallel ranks, so that every rank allocates and frees alike.
Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """groups: CPU groups of this rank in the order pipeline, context, tensor; None for an axis of size 1."""

    def __init__(self, groups: Sequence[ProcessGroup | None]) -> None:
        self._groups = [group for group in groups if group is not None and group.size() > 1]
        self.is_leader = all(group.rank() == 0 for group in self._groups)

    def agree(self, value: int) -> int:
        """The leader's value, on every rank; each calls this at the same point of its work."""
        if not self._groups:
            return value
        shared = torch.tensor([value], dtype=torch.int64)
        for group in self._groups:
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
        return int(shared.item())

    def all_did(self, did: bool) -> bool:
        """Whether every rank did something.  No rank returns before all have called."""
        if not self._groups:
            return did
        shared = torch.tensor([did], dtype=torch.int64)
        for group in self._groups:
            dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
        return bool(shared.item())

    def agree_all(self, values: Sequence[int]) -> list[int]:
        """The leader's values."""
        if not self._groups:
            return list(values)
        shared = torch.zeros(self.agree(len(values)), dtype=torch.int64)
        if not len(shared):
            return []
        if self.is_leader:
            shared = torch.tensor(list(values), dtype=torch.int64)
        for group in self._groups:
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
        return [int(value) for value in shared.tolist()]
