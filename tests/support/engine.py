"""An inference engine as far as its KV cache goes: ranks with CPU tensors, and a KVManager.

A block's bytes are a function of its hash (which covers its whole prefix) and of the rank, so that
whoever reads a block knows what it has to hold.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from daemon import eventually

from flexkv_radix import (
    CacheConfig,
    KVCacheLayout,
    KVCacheLayoutType,
    KVManager,
    KVResponseStatus,
    KVTPClient,
    ModelConfig,
    OpaqueBlockLayout,
    hash_tokens,
)

LAYERFIRST, BLOCKFIRST, LAYERBLOCK = (
    KVCacheLayoutType.LAYERFIRST,
    KVCacheLayoutType.BLOCKFIRST,
    KVCacheLayoutType.LAYERBLOCK,
)
Layout = KVCacheLayout | OpaqueBlockLayout
Tokens = npt.NDArray[np.int64]
_SEED_MASK = (1 << 63) - 1


def tensors_of(layout: Layout, num_tensors: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Zeroed tensors of the shape that layout has when it comes in num_tensors."""
    if isinstance(layout, OpaqueBlockLayout):
        num_bytes = max(layout.layer_stride_bytes, layout.num_block * layout.block_stride_bytes)
        size = num_bytes if num_tensors > 1 or layout.num_layer == 1 else num_bytes * layout.num_layer
        return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num_tensors)]
    shape = layout.kv_shape
    if num_tensors > 1:
        shape = shape[1:] if num_tensors == layout.num_layer else shape[2:]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_tensors)]


class RankMemory:
    """KV tensors of one rank for one component, written and read without the code under test."""

    def __init__(
        self, layout: Layout, num_tensors: int = 1, dtype: torch.dtype = torch.int16, device: str = "cpu"
    ) -> None:
        self.layout = layout
        self.tensors = tensors_of(layout, num_tensors, dtype, device)

    def write(self, block: int, block_hash: int, rank: int) -> None:
        for view, expected in self._chunks(block, block_hash, rank):
            view.copy_(expected)

    def holds(self, block: int, block_hash: int, rank: int) -> bool:
        return all(
            torch.equal(view.cpu(), expected) for view, expected in self._chunks(block, block_hash, rank)
        )

    def is_zero(self, block: int) -> bool:
        return not any(view.any() for view in self._views(block))

    def _chunks(self, block: int, block_hash: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = np.random.default_rng([block_hash, rank])
        for view in self._views(block):
            raw = random.integers(0, 256, view.numel() * view.element_size(), dtype=np.uint8)
            yield view, torch.from_numpy(raw).view(view.dtype).reshape(view.shape)

    def _views(self, block: int) -> Iterator[torch.Tensor]:
        if isinstance(self.layout, OpaqueBlockLayout):
            yield from self._opaque_views(self.layout, block)
            return
        for layer in range(self.layout.num_layer):
            for kv in range(self.layout.kv_dim):
                yield self._view(self.layout, layer, kv, block)

    def _opaque_views(self, layout: OpaqueBlockLayout, block: int) -> Iterator[torch.Tensor]:
        for layer in range(layout.num_layer):
            start = block * layout.block_stride_bytes
            if len(self.tensors) == 1:
                start += layer * layout.layer_stride_bytes
            tensor = self.tensors[layer if len(self.tensors) > 1 else 0]
            yield tensor[start : start + layout.bytes_per_layer]

    def _view(self, layout: KVCacheLayout, layer: int, kv: int, block: int) -> torch.Tensor:
        order = {
            LAYERFIRST: (layer, kv, block),
            BLOCKFIRST: (block, layer, kv),
            LAYERBLOCK: (layer, block, kv),
        }
        index = order[layout.type]
        if len(self.tensors) == 1:
            return self.tensors[0][index]
        if len(self.tensors) == layout.num_layer:
            return self.tensors[layer][index[1:]]
        return self.tensors[kv * layout.num_layer + layer][block]


class Engine:
    """One engine: start() in the constructor, close() at the end of the `with` block.

    ranks: per rank its memories, (group, ...) of FULL; swa: per rank its memory of the SWA component.
    """

    def __init__(
        self,
        server_name: str,
        directory: Path,
        model: ModelConfig,
        cache: CacheConfig,
        ranks: Sequence[Sequence[RankMemory]],
        *,
        swa: Sequence[RankMemory] = (),
        dp_client_id: int = 0,
        environ: dict[str, str] | None = None,
        event_collector: Callable[[list[Any]], None] | None = None,
        register: bool = True,
    ) -> None:
        port = f"ipc://{directory}/flexkv"
        self.server_name = server_name
        self.cache, self.model, self.ranks, self.swa = cache, model, ranks, swa
        self.clients: list[KVTPClient] = []
        with environment(server_name, port, environ):
            self.manager = KVManager(model, cache, dp_client_id, event_collector=event_collector)
            self.manager.start()
        self.block_size = cache.tokens_per_block
        if register:
            self.register(port, dp_client_id)

    def register(self, port: str, dp_client_id: int = 0) -> None:
        per_stage = len(self.ranks) // self.model.pp_size
        for index, memories in enumerate(self.ranks):
            client = KVTPClient(f"{port}_gpu_register", dp_client_id, index % per_stage, index // per_stage)
            swa = self.swa[index] if self.swa else None
            client.register_to_server(
                [memory.tensors for memory in memories] if len(memories) > 1 else memories[0].tensors,
                [memory.layout for memory in memories] if len(memories) > 1 else memories[0].layout,
                swa_kv_caches=swa.tensors if swa else None,
                swa_kv_layout=swa.layout if swa else None,
            )
            self.clients.append(client)

    def wait_ready(self) -> Engine:
        eventually(self.manager.is_ready, "KVManager.is_ready()")
        return self

    def close(self) -> None:
        self.manager.shutdown()
        for client in self.clients:
            client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what an engine does with its cache

    def compute(self, tokens: Tokens, blocks: Sequence[int], *, swa_blocks: Sequence[int] = ()) -> None:
        """Prefill: write KV of the whole blocks of tokens to the engine's blocks."""
        for memories, rank, block, block_hash in self._places(tokens, blocks):
            for group, memory in enumerate(memories):
                memory.write(block, block_hash, rank + 100 * group)
        for memory, rank, block, block_hash in self._window(tokens, swa_blocks):
            memory.write(block, block_hash, rank + 1000)

    def wrong_blocks(
        self, tokens: Tokens, blocks: Sequence[int], *, first: int = 0, swa_blocks: Sequence[int] = ()
    ) -> list[int]:
        """Engine blocks that do not hold what blocks first.. of tokens compute to."""
        wrong = [
            block
            for memories, rank, block, block_hash in self._places(tokens, blocks, first)
            for group, memory in enumerate(memories)
            if not memory.holds(block, block_hash, rank + 100 * group)
        ]
        return wrong + [
            block
            for memory, rank, block, block_hash in self._window(tokens, swa_blocks)
            if not memory.holds(block, block_hash, rank + 1000)
        ]

    def slots(self, blocks: Sequence[int]) -> Tokens:
        """Slot mapping of engine blocks."""
        starts = np.asarray(blocks, dtype=np.int64) * self.block_size
        return (starts[:, None] + np.arange(self.block_size)).reshape(-1)

    def put(self, tokens: Tokens, blocks: Sequence[int], **options: Any) -> int:
        """Compute and store all of tokens; returns the number of tokens moved.  Fails unless it succeeds."""
        self.compute(tokens, blocks)
        task_id, mask = self.manager.put_match(tokens, **options)
        moved = self.moved(mask, blocks)
        if len(moved):
            self.manager.launch([task_id], [self.slots(moved)])
        self.expect(task_id, KVResponseStatus.SUCCESS)
        return int(mask.sum())

    def get(self, tokens: Tokens, blocks: Sequence[int], **options: Any) -> int:
        """Load what is stored of tokens to blocks (one per block of tokens), and check every byte."""
        task_id, mask = self.manager.get_match(tokens, **options)
        moved = self.moved(mask, blocks)
        if len(moved):
            self.manager.launch([task_id], [self.slots(moved)])
        self.expect(task_id, KVResponseStatus.SUCCESS)
        for index, block in enumerate(blocks):
            if block in moved:
                assert self.wrong_blocks(tokens, [block], first=index) == []
        return int(mask.sum())

    def expect(self, task_id: int, status: KVResponseStatus, timeout: float = 20.0) -> Any:
        response = self.manager.wait([task_id], timeout)[task_id]
        assert response.status is status, response
        return response

    def hashes(self, tokens: Tokens) -> npt.NDArray[np.uint64]:
        return hash_tokens(tokens, self.block_size)

    def moved(self, mask: npt.NDArray[np.bool_], blocks: Sequence[int]) -> list[int]:
        """Those of blocks, one per block of a sequence, that mask says are moved."""
        wanted = mask[: len(mask) // self.block_size * self.block_size].reshape(-1, self.block_size)[:, 0]
        return [block for block, is_moved in zip(blocks, wanted.tolist(), strict=False) if is_moved]

    def _places(
        self, tokens: Tokens, blocks: Sequence[int], first: int = 0
    ) -> Iterator[tuple[Sequence[RankMemory], int, int, int]]:
        hashes = self.hashes(tokens).tolist()[first:]
        for rank, memories in enumerate(self.ranks):
            seed = 0 if memories[0].layout.is_replicated else rank
            for block, block_hash in zip(blocks, hashes, strict=False):
                yield memories, seed, block, block_hash

    def _window(self, tokens: Tokens, blocks: Sequence[int]) -> Iterator[tuple[RankMemory, int, int, int]]:
        hashes = self.hashes(tokens).tolist()
        for rank, memory in enumerate(self.swa):
            for block, block_hash in zip(blocks, hashes[len(hashes) - len(blocks) :], strict=True):
                yield memory, rank, block, block_hash


@contextmanager
def environment(server_name: str, port: str, more: dict[str, str] | None = None) -> Iterator[None]:
    """FLEXKV_* as given, and no others."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLEXKV_")}
    named = {"FLEXKV_RADIXSHMEM_SERVER_NAME": server_name, "FLEXKV_SERVER_RECV_PORT": port}
    with patch.dict(os.environ, {**kept, **named, **(more or {})}, clear=True):
        yield


# -- a small engine, for tests that do not care about layouts

BLOCK = 16
LAYERS, HEADS, HEAD_SIZE = 2, 2, 4


def small_model(**changes: Any) -> ModelConfig:
    return ModelConfig(
        **{"num_layers": LAYERS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": "int16", **changes}
    )


def small_memory(num_block: int = 64) -> RankMemory:
    return RankMemory(
        KVCacheLayout(LAYERFIRST, LAYERS, num_block, BLOCK, HEADS, HEAD_SIZE), num_tensors=LAYERS
    )


def small_engine(server_name: str, directory: Path, num_block: int = 64, **options: Any) -> Engine:
    """An engine with one rank and slots of 1024 bytes."""
    model, cache = options.pop("model", small_model()), options.pop("cache", CacheConfig(BLOCK))
    return Engine(server_name, directory, model, cache, [[small_memory(num_block)]], **options)


SMALL_SLOT_BYTES = LAYERS * 2 * BLOCK * HEADS * HEAD_SIZE * 2


def tokens_of(num_tokens: int, name: int = 0) -> Tokens:
    """Token ids that share no block with those of another name."""
    return np.random.default_rng([name, 77]).integers(0, 150_000, num_tokens, dtype=np.int64)


def wait_threads(name_prefix: str) -> None:
    """Until no thread of that name is left."""
    eventually(lambda: not any(thread.name.startswith(name_prefix) for thread in threading.enumerate()))
