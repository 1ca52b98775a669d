"""What try_wait and wait return."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flexkv_radix.tokens import Mask


class KVResponseStatus(Enum):
    """How a task stands.  All but unready and timeout are terminal: the id is forgotten with them."""

    SUCCESS = "success"
    NOT_FOUND = "not_found"  # never given out, or answered before
    UNREADY = "unready"  # matched but not launched
    TIMEOUT = "timeout"  # still running; ask again
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self not in (KVResponseStatus.UNREADY, KVResponseStatus.TIMEOUT)


@dataclass(frozen=True)
class KVResponse:
    """return_mask: tokens that were moved; a list, in launch order, for a batch.  error: why it failed."""

    status: KVResponseStatus
    task_id: int
    return_mask: Mask | list[Mask] | None = None
    error: str = ""
