"""Messages between the engine, its ranks and the transfer worker.

    engine --Submit-->  worker  <--Register-- rank
    engine <-Results--          --Registered->
                                <--Contest--- another engine

All of them are plain data: MessagePack on Unix sockets (wire.py), file descriptors beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from flexkv_radix.transfer.segments import Segment
from radixshmem.geometry import ComponentType


class OpKind(IntEnum):
    """Direction of a transfer, as seen from the engine's memory."""

    H2D = 0  # slots -> engine blocks (load)
    D2H = 1  # engine blocks -> slots (store)


class TransferDied(RuntimeError):  # noqa: N818
    """The transfer worker is gone; what it was doing will never complete."""


@dataclass(frozen=True)
class TransferOp:
    """Move block gpu_blocks[i] to or from slot slots[i] of one pool, on every registered rank.

    layerwise (H2D only): layer by layer, signalling the layers' eventfds of counter_id.  An op
    signals the layers that have bytes in its component, so a layerwise load of a hybrid model needs
    one op per component; an op without blocks signals its layers at once.
    """

    op_id: int  # chosen by the submitter, returned in the result
    kind: OpKind
    component: ComponentType
    gpu_blocks: npt.NDArray[np.int64]  # block ids, equal on all ranks
    slots: npt.NDArray[np.int32]  # same length
    layerwise: bool = False
    counter_id: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("gpu_blocks", np.int64), ("slots", np.int32)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise TypeError(f"{name}: 1-D {np.dtype(dtype)} expected, not {array.ndim}-D {array.dtype}")
        if len(self.gpu_blocks) != len(self.slots):
            raise ValueError(f"slots: {len(self.slots)} given for {len(self.gpu_blocks)} gpu_blocks")
        if self.layerwise and self.kind is not OpKind.H2D:
            raise ValueError("layerwise: only loads (H2D) go layer by layer")


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

    As registered, slot offsets count from the start of the rank's own share; place_ranks makes them
    offsets in the slot.
    """

    component: ComponentType
    num_blocks: int
    tensors: tuple[TensorView, ...]
    segments: tuple[Segment, ...]
    replicated: bool = False  # all tensor-parallel ranks hold the same bytes (MLA)
    stores: bool = True  # set by place_ranks: False for replicas, which only load

    @property
    def share_bytes(self) -> int:
        """Bytes of every slot that are this rank's."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True)
class RankPlace:
    """Which rank of one engine this is."""

    dp_client_id: int = 0
    pp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True)
class RegisterRank:
    """A rank hands its KV tensors over, once, on a connection that stays open."""

    place: RankPlace
    storages: tuple[StorageHandle, ...]
    parts: tuple[RankPart, ...]
    device_uuid: str = ""  # "": CPU tensors
    step_event: bytes = b""  # CUDA IPC event that the rank records on its compute stream, or none


@dataclass(frozen=True)
class LayerwiseSocket:
    """Where the worker listens for the eventfds of the ranks of one pipeline stage."""

    path: str
    pp_rank: int = 0


class CudaPath(IntEnum):
    """What moves the blocks of CUDA tensors."""

    AUTO = 0  # the first of the following that suits a part
    ROWS = 1  # the copy engine, a command for all rows of a block
    BATCH = 2  # the copy engine, a copy for each segment
    KERNEL = 3


@dataclass(frozen=True)
class Owner:
    """The engine that a register endpoint is meant for (claims.py)."""

    pid: int  # of the KVManager's process
    claim: int  # which byte it has locked
    is_private: bool  # no other engine is given the endpoint; else only what pid has started may register


@dataclass(frozen=True)
class TransferConfig:
    """Everything that the worker of one engine is started with."""

    store: StoreSpec
    num_ranks: int  # the worker is ready once so many have registered
    register_endpoint: str  # Unix socket path, "ipc://" allowed
    copy_threads: int = 0  # CPU tensors, per direction; 0: chosen from the number of cores
    thread_blocks: int = 0  # CUDA: always a kernel, of so many thread blocks; 0: chosen
    cuda_path: CudaPath = CudaPath.AUTO
    queue_threads: int = 0  # CUDA: threads that queue one op's copies for a GPU; 0: chosen
    layerwise_sockets: tuple[LayerwiseSocket, ...] = ()
    owner: Owner | None = None  # whose processes may register; None: all of this user


class Start(msgspec.Struct, tag=True, frozen=True):
    """engine -> worker, first of all."""

    config: TransferConfig


class MarkDevice(msgspec.Struct, tag=True, frozen=True):
    """worker -> engine: about to register slots with a device; waits for DeviceMarked."""


class DeviceMarked(msgspec.Struct, tag=True, frozen=True):
    """engine -> worker."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """worker -> engine: every rank has registered."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """worker -> engine: so many ranks have registered now."""

    num_ranks: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """worker -> engine, before it exits."""

    error: str


class Submit(msgspec.Struct, tag=True, frozen=True):
    """engine -> worker."""

    ops: list[TransferOp]


class Results(msgspec.Struct, tag=True, frozen=True):
    """worker -> engine."""

    results: list[OpResult]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """engine -> worker: finish what runs, drop the rest, exit."""


class Register(msgspec.Struct, tag=True, frozen=True):
    """rank -> worker; the file descriptors of its CPU storages follow."""

    rank: RegisterRank


class Registered(msgspec.Struct, tag=True, frozen=True):
    """worker -> rank; error "" when its memory is mapped; may_pass: it may be taken another time."""

    error: str
    may_pass: bool = False


class Contest(msgspec.Struct, tag=True, frozen=True):
    """another engine -> worker, where ranks register: it claims the endpoint, too."""


Message: TypeAlias = (
    Start
    | MarkDevice
    | DeviceMarked
    | Ready
    | Joined
    | Failed
    | Submit
    | Results
    | Stop
    | Register
    | Registered
    | Contest
)


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"{type(value).__name__} does not go over the wire")


def _decode_array(kind: Any, value: Any) -> Any:
    (scalar,) = get_args(get_args(kind)[1])  # of NDArray[scalar]
    return np.frombuffer(value, dtype=scalar)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_decode_array)


def encode(message: Message) -> bytes:
    """Bytes of message for the wire."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in data; msgspec.DecodeError or ValueError when it is none."""
    message: Message = _decoder.decode(data)
    return message
