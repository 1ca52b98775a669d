"""Plain records that the binding exchanges with the rest of the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from radixshmem.geometry import ComponentType, PublishedGeometry

EVICT_POLICIES = ("lru", "lfu", "slru", "fifo")  # in the order of the core's RS_* values
DEFAULT_MAX_CLIENTS = 256
DEFAULT_PINS_PER_CLIENT = 1024


class RegionState(IntEnum):
    """Life of a region."""

    BUILDING = 1
    READY = 2
    RETIRED = 3


class ClientState(IntEnum):
    """Life of an entry of the client table."""

    FREE = 0
    ACTIVE = 1
    DYING = 2


class QueryStatus(IntEnum):
    """``QueryResult.status``: anything but OK comes with a zero hit."""

    OK = 0
    BUSY = 1
    PIN_LIMIT = 2


class EventKind(IntEnum):
    STORED = 1
    REMOVED = 2
    CLEARED = 3


class EventReason(IntEnum):
    """Why a block was removed."""

    NONE = 0
    CAPACITY = 1
    BACKGROUND = 2
    REQUEST = 3
    RESET = 4


class Event(NamedTuple):
    """One change of the tree.  ``parent_hash`` is None for the first block of a path.

    ``number`` counts events from 0; ``client`` is the table slot and ``incarnation`` the attach of
    the client whose verb wrote it.
    """

    kind: EventKind
    reason: EventReason
    hash: int
    parent_hash: int | None
    component: ComponentType
    number: int
    client: int
    incarnation: int


@dataclass(frozen=True)
class RegionConfig:
    """Everything that an index is made from.  ``epoch``: 16 random bytes, also in the SlotStore."""

    geometry: PublishedGeometry
    epoch: bytes = bytes(16)
    data_bytes: int = 0
    swa_ratio: float = 0.0
    mamba_ratio: float = 0.0
    data_name: str = ""
    hugepage_path: str = ""
    evict_policy: str = "lru"
    max_clients: int = DEFAULT_MAX_CLIENTS
    pins_per_client: int = DEFAULT_PINS_PER_CLIENT
    event_capacity: int = 0
    reap_quarantine_s: float = 2.0


@dataclass(frozen=True)
class RegionInfo:
    """An index as its header describes it."""

    config: RegionConfig
    region_bytes: int
    generation: int
    layout_version: int
    state: RegionState


@dataclass(frozen=True)
class StoreInfo:
    """A SlotStore as its header describes it.  Offsets and sizes in bytes of the file."""

    total_bytes: int
    data_offset: int
    epoch: bytes
    state: RegionState
    layout_version: int


class ReapResult(NamedTuple):
    """What a reap gave back, and how many dead clients wait out their quarantine."""

    clients: int
    pins: int
    slots: int
    dying: int


@dataclass(frozen=True)
class ClientRecord:
    """One entry of the client table.  ``pid`` is as the client saw itself: for display only.

    ``is_alive``: its process runs.  ``is_leased``: that, or a transfer worker that may still write its slots.
    """

    slot: int
    state: ClientState
    device: bool
    pid: int
    incarnation: int
    pid_namespace: int
    attached_unix_ns: int
    deadline_ns: int
    num_pins: int
    num_staged: tuple[int, int, int]
    is_alive: bool
    is_leased: bool
    queries: int
    hit_blocks: int
    miss_blocks: int
    label: str


@dataclass(frozen=True)
class SideRecord:
    """A block's slot in a side pool (-1: none), and its share in windows."""

    slot: int
    pins: int
    cover: int
    is_end: bool


@dataclass(frozen=True)
class Node:
    """A FULL slot that is PUBLISHED (or STAGED: then ``hash`` means nothing).

    ``parent`` is the parent's slot, or -1 - g for a first block under root g.
    """

    slot: int
    is_published: bool
    owner: int
    generation: int
    parent: int | None
    hash: int
    num_children: int
    pins: int
    last_access: int
    is_path_pinned: bool
    sides: dict[ComponentType, SideRecord] = field(default_factory=dict)


class SnapshotSummary(NamedTuple):
    """Slots per component (FULL, SWA, MAMBA) by what may happen to them, and all pins."""

    free: tuple[int, int, int]
    staged: tuple[int, int, int]
    pinned: tuple[int, int, int]
    evictable: tuple[int, int, int]
    num_pins: int
