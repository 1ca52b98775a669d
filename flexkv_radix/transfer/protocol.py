"""Messages between the engine, its ranks and the transfer worker.

    engine --TransferOp-->  worker  <--RegisterRank-- rank
    engine <--OpResult----

All of them are plain data: MessagePack on Unix sockets, file descriptors beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from flexkv_radix.transfer.segments import Segment
from radixshmem.geometry import ComponentType


class OpKind(IntEnum):
    """Direction of a transfer, as seen from the engine's memory."""

    H2D = 0  # slots -> engine blocks (load)
    D2H = 1  # engine blocks -> slots (store)


class TransferDied(RuntimeError):
    """The transfer worker is gone; what it was doing will never complete."""


@dataclass(frozen=True)
class TransferOp:
    """Move block gpu_blocks[i] to or from slot slots[i] of one pool, on every registered rank."""

    op_id: int  # chosen by the submitter, returned in the result
    kind: OpKind
    component: ComponentType
    gpu_blocks: npt.NDArray[np.int64]  # block ids, equal on all ranks
    slots: npt.NDArray[np.int32]  # same length
    layerwise: bool = False  # H2D only: layer by layer, signalling the eventfds of counter_id
    counter_id: int = 0


@dataclass(frozen=True)
class OpResult:
    """Outcome of one TransferOp.  ok False: error says why, and the target bytes are undefined."""

    op_id: int
    ok: bool
    error: str = ""
    num_bytes: int = 0  # moved, all ranks together
    started_ns: int = 0  # time.monotonic_ns() of the worker
    finished_ns: int = 0


@dataclass(frozen=True)
class PoolSpec:
    """One pool of the SlotStore file."""

    component: ComponentType
    offset_bytes: int  # of slot 0 in the file
    num_slots: int
    stride_bytes: int  # from one slot to the next
    slot_bytes: int  # of a slot that carry data (<= stride_bytes)


@dataclass(frozen=True)
class StoreSpec:
    """The SlotStore file that the worker maps."""

    path: str
    pools: tuple[PoolSpec, ...]


@dataclass(frozen=True)
class StorageHandle:
    """Memory of a rank that the worker can map.

    CPU: the next of the file descriptors sent along.  CUDA: ipc_handle of the allocation, of which
    the storage is the num_bytes at ipc_offset_bytes.
    """

    num_bytes: int
    ipc_handle: bytes = b""
    ipc_offset_bytes: int = 0


@dataclass(frozen=True)
class TensorView:
    """Bytes of one tensor within a storage."""

    storage: int  # index into RegisterRank.storages
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class RankPart:
    """What one rank holds of every block of one component.

    As sent, slot offsets count from the rank's own share of the slot; the worker makes them absolute
    with placement.place_ranks once all ranks have registered (and that sets `stores`).
    """

    component: ComponentType
    num_blocks: int
    tensors: tuple[TensorView, ...]
    segments: tuple[Segment, ...]
    replicated: bool = False  # all ranks of the pipeline stage hold the same bytes (MLA)
    stores: bool = True  # False: a replica that only loads

    @property
    def share_bytes(self) -> int:
        """Bytes of a slot that this rank's share takes."""
        return sum(s.num_bytes for s in self.segments)


@dataclass(frozen=True)
class RankPlace:
    """Which rank of one engine this is."""

    dp_client_id: int = 0
    pp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True)
class RegisterRank:
    """A rank hands its KV tensors over.  Sent once per rank on a connection that stays open."""

    place: RankPlace
    storages: tuple[StorageHandle, ...]
    parts: tuple[RankPart, ...]
    device_uuid: str = ""  # "": CPU tensors
    step_event: bytes = b""  # CUDA IPC event that the rank records on its compute stream, or none


@dataclass(frozen=True)
class TransferConfig:
    """Everything that the worker of one engine is started with."""

    store: StoreSpec
    num_ranks: int  # the worker is ready once so many have registered
    register_endpoint: str  # Unix socket path, "ipc://" allowed
    copy_threads: int = 0  # CPU tensors; 0: chosen from the number of cores
    thread_blocks: int = 0  # CUDA; 0: the measured default
    layerwise_sockets: tuple[str, ...] = field(default=())  # listen here for eventfds
