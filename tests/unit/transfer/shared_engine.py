"""An engine without a model: KV tensors in memfds, ranks as processes, a store file in /dev/shm."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from flexkv_radix.layout import BlockLayout, KVCacheLayout, KVCacheLayoutType, OpaqueBlockLayout
from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import (
    LayerwiseSocket,
    OpKind,
    OpResult,
    PoolSpec,
    RankPart,
    RankPlace,
    Register,
    RegisterRank,
    StorageHandle,
    StoreSpec,
    TensorView,
    TransferConfig,
    TransferOp,
    encode,
)
from flexkv_radix.transfer.registration import Registration, register_rank
from flexkv_radix.transfer.segments import Segment
from radixshmem.geometry import ComponentType

DEADLINE_S = 20.0
_numbers = itertools.count()


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not happen in {deadline_s} s"
        time.sleep(0.002)


@contextlib.contextmanager
def open_store(
    slot_bytes: dict[ComponentType, int], num_slots: int, slot_gap_bytes: int = 0
) -> Iterator[Store]:
    """A store file of num_slots per pool; removed at the end."""
    path = f"/dev/shm/t_transfer_{os.getpid()}_{next(_numbers)}"
    pools, end = [], 4096
    for component, num_bytes in slot_bytes.items():
        pools.append(PoolSpec(component, end, num_slots, num_bytes + slot_gap_bytes, num_bytes))
        end += num_slots * (num_bytes + slot_gap_bytes) + 64
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, end)
        yield Store(StoreSpec(path, tuple(pools)), _map(fd, end))
    finally:
        os.close(fd)
        os.unlink(path)


def _map(fd: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)


@dataclass
class Store:
    spec: StoreSpec
    bytes: np.ndarray

    def slots(self, component: ComponentType = ComponentType.FULL) -> np.ndarray:
        """[num_slots, slot_bytes], a view."""
        pool = next(pool for pool in self.spec.pools if pool.component is component)
        whole = self.bytes[pool.offset_bytes : pool.offset_bytes + pool.num_slots * pool.stride_bytes]
        return whole.reshape(pool.num_slots, pool.stride_bytes)[:, : pool.slot_bytes]

    def gaps(self, component: ComponentType = ComponentType.FULL) -> np.ndarray:
        """What lies between the slots and must never change."""
        pool = next(pool for pool in self.spec.pools if pool.component is component)
        whole = self.bytes[pool.offset_bytes : pool.offset_bytes + pool.num_slots * pool.stride_bytes]
        return whole.reshape(pool.num_slots, pool.stride_bytes)[:, pool.slot_bytes :]


@dataclass
class EnginePart:
    """KV of one component: layouts (groups of layers) over tensors that are memfds of their own."""

    component: ComponentType
    layouts: Sequence[BlockLayout]
    tensors_per_layout: Sequence[int]
    itemsize: int = 2
    replicated: bool = False
    tensors: list[np.ndarray] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layout, num_tensors in zip(self.layouts, self.tensors_per_layout, strict=True):
            for _ in range(num_tensors):
                num_bytes = _tensor_bytes(layout, num_tensors, self.itemsize)
                fd = os.memfd_create("kv")
                os.ftruncate(fd, num_bytes)
                self.fds.append(fd)
                self.tensors.append(_map(fd, num_bytes))

    @property
    def num_blocks(self) -> int:
        return min(layout.num_block for layout in self.layouts)

    @property
    def share_bytes(self) -> int:
        return sum(layout.block_bytes(self.itemsize) for layout in self.layouts)

    def rank_part(self, first_storage: int) -> RankPart:
        """As a rank registers it: the groups' segments, one after the other."""
        segments: list[Segment] = []
        first_tensor = first_layer = offset = 0
        for layout, num_tensors in zip(self.layouts, self.tensors_per_layout, strict=True):
            segments += [
                replace(
                    s,
                    tensor=s.tensor + first_tensor,
                    layer=s.layer + first_layer,
                    slot_offset_bytes=s.slot_offset_bytes + offset,
                )
                for s in layout.segments(num_tensors, self.itemsize)
            ]
            first_tensor += num_tensors
            first_layer += layout.num_layer
            offset += layout.block_bytes(self.itemsize)
        views = tuple(TensorView(first_storage + i, 0, len(t)) for i, t in enumerate(self.tensors))
        return RankPart(self.component, self.num_blocks, views, tuple(segments), self.replicated)

    def block(self, number: int) -> np.ndarray:
        """Bytes of a block in slot order."""
        return self.blocks()[number]

    def blocks(self) -> np.ndarray:
        """[num_blocks, share_bytes], a copy; found without segments."""
        runs, first = [], 0
        for layout, num_tensors in zip(self.layouts, self.tensors_per_layout, strict=True):
            tensors = self.tensors[first : first + num_tensors]
            runs.append(_blocks_of(layout, tensors, self.itemsize)[: self.num_blocks])
            first += num_tensors
        return np.concatenate(runs, axis=1)


def _tensor_bytes(layout: BlockLayout, num_tensors: int, itemsize: int) -> int:
    if isinstance(layout, OpaqueBlockLayout):
        if num_tensors > 1 or layout.num_layer == 1:
            return layout.num_block * layout.block_stride_bytes
        last = (layout.num_layer - 1) * layout.layer_stride_bytes + (
            layout.num_block - 1
        ) * layout.block_stride_bytes
        return last + layout.bytes_per_layer
    assert isinstance(layout, KVCacheLayout)
    return int(np.prod(layout.kv_shape)) * itemsize // num_tensors


def _blocks_of(layout: BlockLayout, tensors: Sequence[np.ndarray], itemsize: int) -> np.ndarray:
    if isinstance(layout, OpaqueBlockLayout):
        if len(tensors) == 1:
            tensors = [tensors[0][layer * layout.layer_stride_bytes :] for layer in range(layout.num_layer)]
        starts = np.arange(layout.num_block)[:, None] * layout.block_stride_bytes
        columns = starts + np.arange(layout.bytes_per_layer)
        return np.concatenate([tensor[columns] for tensor in tensors], axis=1)
    assert isinstance(layout, KVCacheLayout)
    if len(tensors) == layout.num_layer * layout.kv_dim and layout.kv_dim == 2:  # all K, then all V
        tensors = [
            tensors[kv * layout.num_layer + layer] for layer in range(layout.num_layer) for kv in range(2)
        ]
    whole = np.concatenate(tensors).reshape(*layout.kv_shape, itemsize)
    block_axis = {"LAYERFIRST": 2, "BLOCKFIRST": 0, "LAYERBLOCK": 1}[layout.type.value]
    return np.moveaxis(whole, block_axis, 0).reshape(layout.num_block, -1)


@dataclass
class EngineRank:
    place: RankPlace
    parts: Sequence[EnginePart]

    def message(self) -> RegisterRank:
        storages = [StorageHandle(len(tensor)) for part in self.parts for tensor in part.tensors]
        parts, first = [], 0
        for part in self.parts:
            parts.append(part.rank_part(first))
            first += len(part.tensors)
        return RegisterRank(self.place, tuple(storages), tuple(parts))

    @property
    def fds(self) -> list[int]:
        return [fd for part in self.parts for fd in part.fds]

    def register(self, endpoint: str) -> Registration:
        """Register from this process."""
        return register_rank(endpoint, self.message(), self.fds, timeout_s=DEADLINE_S)

    def spawn(self, endpoint: str, *more: str) -> subprocess.Popen[bytes]:
        """Register from a process of its own (rank_main.py), which stays until its stdin is closed."""
        script = Path(__file__).with_name("rank_main.py")
        command = [sys.executable, str(script), endpoint, ",".join(map(str, self.fds)), *more]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self.fds)
        assert process.stdin is not None
        payload = encode(Register(self.message()))
        process.stdin.write(len(payload).to_bytes(4, "little") + payload)
        process.stdin.flush()
        return process


@dataclass
class Engine:
    """A started handle with its ranks."""

    handle: TransferHandle
    store: Store
    ranks: Sequence[EngineRank]
    processes: list[subprocess.Popen[bytes]]  # of the ranks, if they are processes of their own
    config: TransferConfig
    op_ids: Iterator[int] = field(default_factory=itertools.count)

    def op(
        self,
        kind: OpKind,
        blocks: Sequence[int] | np.ndarray,
        slots: Sequence[int] | np.ndarray,
        component: ComponentType = ComponentType.FULL,
        *,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> TransferOp:
        blocks, slots = np.asarray(blocks, dtype=np.int64), np.asarray(slots, dtype=np.int32)
        return TransferOp(next(self.op_ids), kind, component, blocks, slots, layerwise, counter_id)

    def run(self, *ops: TransferOp) -> list[OpResult]:
        """Results of ops, in their order."""
        self.handle.submit(list(ops))
        results: dict[int, OpResult] = {}
        end_s = time.monotonic() + DEADLINE_S
        while len(results) < len(ops):
            assert time.monotonic() < end_s, f"{len(results)} of {len(ops)} ops came back"
            results |= {result.op_id: result for result in self.handle.poll(1.0)}
        return [results[op.op_id] for op in ops]


def lease_file() -> int:
    return os.memfd_create("lease")


@contextlib.contextmanager
def start_engine(
    store: Store,
    ranks: Sequence[EngineRank],
    directory: Path,
    *,
    copy_threads: int = 2,
    layerwise: bool = False,
    spawn: bool | None = None,
) -> Iterator[Engine]:
    """Start a worker with its ranks and wait until they are ready.

    spawn: the ranks are processes; by default if there are several.
    """
    sockets = tuple(
        LayerwiseSocket(str(directory / f"layerwise_pp{pp}"), pp)
        for pp in sorted({r.place.pp_rank for r in ranks})
    )
    config = TransferConfig(
        store.spec,
        len(ranks),
        f"ipc://{directory}/register",
        copy_threads,
        layerwise_sockets=sockets if layerwise else (),
    )
    lease_fd = lease_file()
    handle = TransferHandle(config, lease_fd=lease_fd)
    handle.start()
    os.close(lease_fd)
    processes, registrations = [], []
    try:
        if spawn or (spawn is None and len(ranks) > 1):
            processes += [rank.spawn(config.register_endpoint) for rank in ranks]
        else:
            registrations += [rank.register(config.register_endpoint) for rank in ranks]
        wait_for(handle.is_ready, "the worker's readiness")
        yield Engine(handle, store, ranks, processes, config)
    finally:
        handle.shutdown()
        for registration in registrations:
            registration.close()
        for process in processes:
            stop_rank(process)


def stop_rank(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait(DEADLINE_S)


def kv_part(
    kind: KVCacheLayoutType,
    *,
    kv_dim: int = 2,
    num_tensors: int = 1,
    num_blocks: int = 13,
    num_layers: int = 3,
    component: ComponentType = ComponentType.FULL,
    replicated: bool = False,
) -> EnginePart:
    """A small KV cache: 4 tokens, 2 heads of 20 elements of 2 bytes."""
    layout = KVCacheLayout(kind, num_layers, num_blocks, 4, 2, 20, kv_dim=kv_dim)
    return EnginePart(component, [layout], [num_tensors], replicated=replicated)


def scramble(rng: np.random.Generator, *arrays: np.ndarray) -> None:
    """Fill arrays with fresh random bytes."""
    for array in arrays:
        array[...] = rng.integers(0, 256, array.shape, dtype=np.uint8)
