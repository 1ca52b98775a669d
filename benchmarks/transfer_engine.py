"""An engine for the transfer benchmarks: radix-server, KVManager and one rank, on a CPU or a GPU.

Slots are 2.25 MiB: 36 layers × K/V × 32 KiB.  A round stores some prompts, loads them again, and loads
them layer by layer; what is timed is launch() up to the answer, with `depth` launches under way.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flexkv_radix import CacheConfig, KVCacheLayout, KVCacheLayoutType, KVManager, KVTPClient, ModelConfig
from flexkv_radix.layerwise import LayerEvents
from flexkv_radix.responses import KVResponseStatus
from radixshmem import RadixServer, ServerConfig

NUM_LAYERS, NUM_HEADS, HEAD_SIZE, BLOCK_TOKENS = 36, 8, 128, 16
SLOT_BYTES = NUM_LAYERS * 2 * BLOCK_TOKENS * NUM_HEADS * HEAD_SIZE * 2
_WAIT_S = 60.0

Tokens = NDArray[np.int64]


@dataclass
class TransferEngine:
    """manager is ready; kv holds num_blocks blocks on the device."""

    manager: KVManager
    events: LayerEvents
    kv: list[torch.Tensor]
    num_blocks: int
    rng: np.random.Generator

    def round(self, num_calls: int, n: int, depth: int) -> dict[str, float]:
        """GB/s of stores, loads and layerwise loads of num_calls prompts of n blocks each."""
        prompts = [self.rng.integers(0, 1 << 40, n * BLOCK_TOKENS) for _ in range(num_calls)]
        gbps = {}
        for what in ("D2H", "H2D", "H2D layerwise"):
            match = self.manager.put_match if what == "D2H" else self.manager.get_match
            tasks = [self._matched(match(prompt), n) for prompt in prompts]
            seconds = self._launch_all(tasks, n, depth, layerwise=what.endswith("layerwise"))
            gbps[what] = num_calls * n * SLOT_BYTES / seconds / 1e9
        return gbps

    def _matched(self, answer: tuple[int, NDArray[np.bool_]], n: int) -> int:
        task, mask = answer
        if mask.sum() != n * BLOCK_TOKENS:
            raise RuntimeError(f"{mask.sum()} of {n * BLOCK_TOKENS} tokens would move")
        return task

    def _launch_all(self, tasks: list[int], n: int, depth: int, *, layerwise: bool) -> float:
        mappings = [self._mapping(n) for _ in tasks]
        under_way: list[int] = []
        begin = time.perf_counter()
        for task, mapping in zip(tasks, mappings, strict=True):
            if len(under_way) == depth:
                self._finish(under_way.pop(0))
            under_way += self.manager.launch([task], [mapping], layerwise_transfer=layerwise)
        for task in under_way:
            self._finish(task)
        return time.perf_counter() - begin

    def _finish(self, task: int) -> None:
        response = self.manager.wait([task], _WAIT_S)[task]
        if response.status is not KVResponseStatus.SUCCESS:
            raise RuntimeError(f"a transfer ended as {response.status}")

    def _mapping(self, n: int) -> Tokens:
        blocks = self.rng.permutation(self.num_blocks)[:n]
        return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)

    def check(self) -> None:
        """A prompt is stored, its blocks are cleared and loaded again: the same bytes."""
        n = min(8, self.num_blocks)
        prompt, mapping = self.rng.integers(0, 1 << 40, n * BLOCK_TOKENS), self._mapping(n)
        before = [tensor.clone() for tensor in self.kv]
        self._finish(self.manager.put_async(prompt, mapping))
        for tensor in self.kv:
            tensor.zero_()
        self._synchronize()
        self._finish(self.manager.get_async(prompt, mapping))
        blocks = torch.from_numpy(mapping[::BLOCK_TOKENS] // BLOCK_TOKENS)
        for tensor, old in zip(self.kv, before, strict=True):
            if not torch.equal(tensor[:, blocks.to(tensor.device)], old[:, blocks.to(old.device)]):
                raise RuntimeError("the bytes that came back differ")
            tensor.copy_(old)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.kv[0].is_cuda:
            torch.cuda.synchronize()


@contextmanager
def transfer_engine(
    device: str,
    num_blocks: int,
    *,
    one_tensor: bool,
    settings: dict[str, str] | None = None,
    hugepage_path: str = "",
) -> Iterator[TransferEngine]:
    """An engine with as many slots as blocks.

    one_tensor: all layers in one tensor, as engines with cross-layer blocks have it; else a tensor for
    each layer, as most have.
    """
    name = f"/bench-transfer-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port = f"ipc://{folder}/kv"
        layerwise = f"{folder}/layerwise"
        stack.enter_context(
            _environment(
                {
                    "FLEXKV_RADIXSHMEM_SERVER_NAME": name,
                    "FLEXKV_SERVER_RECV_PORT": port,
                    "FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1",
                    "FLEXKV_LAYERWISE_EVENTFD_SOCKET": layerwise,
                    **(settings or {}),
                }
            )
        )
        config = ServerConfig(
            name=name, data_bytes=num_blocks * SLOT_BYTES, metrics_address="", hugepage_path=hugepage_path
        )
        stack.enter_context(RadixServer(config))
        model = ModelConfig(
            num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float16"
        )
        manager = KVManager(model, CacheConfig(BLOCK_TOKENS))
        stack.callback(manager.shutdown)
        manager.start()
        kv, layout = _kv(device, num_blocks, one_tensor)
        rank = KVTPClient(f"{port}_gpu_register", 0, 0)
        stack.callback(rank.close)
        rank.register_to_server(kv, layout)
        events = LayerEvents(NUM_LAYERS)
        stack.callback(events.close)
        events.connect(layerwise, 0, 1)
        _wait_ready(manager)
        yield TransferEngine(manager, events, kv, num_blocks, np.random.default_rng(1))


def _kv(device: str, num_blocks: int, one_tensor: bool) -> tuple[list[torch.Tensor], KVCacheLayout]:
    layout = KVCacheLayout(
        KVCacheLayoutType.LAYERFIRST, NUM_LAYERS, num_blocks, BLOCK_TOKENS, NUM_HEADS, HEAD_SIZE
    )
    shape = (NUM_LAYERS * 2, num_blocks, BLOCK_TOKENS * NUM_HEADS * HEAD_SIZE)
    whole = torch.randint(-1000, 1000, shape, dtype=torch.int16, device=device)
    if one_tensor:
        return [whole], layout
    return [whole[2 * layer : 2 * layer + 2].clone() for layer in range(NUM_LAYERS)], layout


def _wait_ready(manager: KVManager) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not manager.is_ready():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the KVManager was not ready in {_WAIT_S} s")
        time.sleep(0.01)
    if manager.disabled:
        raise RuntimeError(manager.disabled)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    for key in [key for key in os.environ if key.startswith("FLEXKV_")]:
        del os.environ[key]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
