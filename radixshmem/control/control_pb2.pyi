from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchReadyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("geometry",)
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    geometry: Geometry
    def __init__(self, geometry: _Optional[_Union[Geometry, _Mapping]] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("block_size", "full_slot_bytes", "swa_slot_bytes", "swa_window_blocks", "mamba_slot_bytes", "slot_align", "register_chunk_tokens", "fingerprint", "full_slots", "swa_slots", "mamba_slots")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FULL_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWA_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWA_WINDOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAMBA_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_ALIGN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FULL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SWA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAMBA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    full_slot_bytes: int
    swa_slot_bytes: int
    swa_window_blocks: int
    mamba_slot_bytes: int
    slot_align: int
    register_chunk_tokens: int
    fingerprint: str
    full_slots: int
    swa_slots: int
    mamba_slots: int
    def __init__(self, block_size: _Optional[int] = ..., full_slot_bytes: _Optional[int] = ..., swa_slot_bytes: _Optional[int] = ..., swa_window_blocks: _Optional[int] = ..., mamba_slot_bytes: _Optional[int] = ..., slot_align: _Optional[int] = ..., register_chunk_tokens: _Optional[int] = ..., fingerprint: _Optional[str] = ..., full_slots: _Optional[int] = ..., swa_slots: _Optional[int] = ..., mamba_slots: _Optional[int] = ...) -> None: ...

class PublishedGeometry(_message.Message):
    __slots__ = ("block_size", "slot_align", "register_chunk_tokens", "fingerprint", "pools")
    class PoolsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: PublishedGeometry.Pool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[PublishedGeometry.Pool, _Mapping]] = ...) -> None: ...
    class Pool(_message.Message):
        __slots__ = ("num_slots", "slot_bytes", "window_blocks")
        NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
        SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
        WINDOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        num_slots: int
        slot_bytes: int
        window_blocks: int
        def __init__(self, num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., window_blocks: _Optional[int] = ...) -> None: ...
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOT_ALIGN_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    slot_align: int
    register_chunk_tokens: int
    fingerprint: str
    pools: _containers.MessageMap[str, PublishedGeometry.Pool]
    def __init__(self, block_size: _Optional[int] = ..., slot_align: _Optional[int] = ..., register_chunk_tokens: _Optional[int] = ..., fingerprint: _Optional[str] = ..., pools: _Optional[_Mapping[str, PublishedGeometry.Pool]] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("name", "index_name", "data_name", "endpoint", "mode", "last_error", "rank", "world_size", "data_plane", "geometry", "hugepage_path", "pid", "epoch", "version", "progress")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    HUGEPAGE_PATH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    index_name: str
    data_name: str
    endpoint: str
    mode: str
    last_error: str
    rank: int
    world_size: int
    data_plane: bool
    geometry: PublishedGeometry
    hugepage_path: str
    pid: int
    epoch: str
    version: str
    progress: float
    def __init__(self, name: _Optional[str] = ..., index_name: _Optional[str] = ..., data_name: _Optional[str] = ..., endpoint: _Optional[str] = ..., mode: _Optional[str] = ..., last_error: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., data_plane: bool = ..., geometry: _Optional[_Union[PublishedGeometry, _Mapping]] = ..., hugepage_path: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[str] = ..., version: _Optional[str] = ..., progress: _Optional[float] = ...) -> None: ...
