"""Ranks whose KV tensors are on a GPU, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from shared_engine import Engine, EnginePart, Store, wait_for

from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import (
    CudaPath,
    LayerwiseSocket,
    RankPart,
    RankPlace,
    RegisterRank,
    TransferConfig,
)
from flexkv_radix.transfer.registration import Registration, register_rank
from flexkv_radix.transfer.tensors import share_tensors

TIMEOUT_S = 60.0


@dataclass
class GpuPart:
    """A CPU EnginePart (the model of what is where) and its tensors' twins on a device."""

    model: EnginePart
    device: str = "cuda:0"
    tensors: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = [
            torch.zeros(len(t), dtype=torch.uint8, device=self.device) for t in self.model.tensors
        ]

    def push(self) -> None:
        """Model to device."""
        for tensor, array in zip(self.tensors, self.model.tensors, strict=True):
            tensor.copy_(torch.from_numpy(array))
        torch.cuda.synchronize(self.device)

    def pull(self) -> np.ndarray:
        """[num_blocks, share_bytes] as the device has it."""
        torch.cuda.synchronize(self.device)
        for tensor, array in zip(self.tensors, self.model.tensors, strict=True):
            array[...] = tensor.cpu().numpy()
        return self.model.blocks()


def registration(parts: Sequence[GpuPart], place: RankPlace, step_event: bytes = b"") -> RegisterRank:
    shared = share_tensors([tensor for part in parts for tensor in part.tensors])
    rank_parts: list[RankPart] = []
    first = 0
    for part in parts:
        views = shared.views[first : first + len(part.tensors)]
        rank_parts.append(replace(part.model.rank_part(0), tensors=tuple(views)))
        first += len(part.tensors)
    return RegisterRank(place, shared.storages, tuple(rank_parts), shared.device_uuid, step_event)


@contextlib.contextmanager
def start_gpu_engine(
    store: Store,
    ranks: Sequence[RegisterRank],
    directory: Path,
    *,
    num_ranks: int = 0,
    layerwise: bool = False,
    thread_blocks: int = 0,
    path: CudaPath = CudaPath.AUTO,
    marks: list[int] | None = None,
) -> Iterator[Engine]:
    """A worker to which ranks (of this process) are registered; num_ranks counts others' too."""
    sockets = (LayerwiseSocket(str(directory / "layerwise")),) if layerwise else ()
    config = TransferConfig(
        store.spec,
        num_ranks or len(ranks),
        f"{directory}/register",
        thread_blocks=thread_blocks,
        cuda_path=path,
        layerwise_sockets=sockets,
    )
    lease_fd = os.memfd_create("lease")
    marked = [] if marks is None else marks
    handle = TransferHandle(config, lease_fd=lease_fd, mark_device=lambda: marked.append(1))
    handle.start()
    os.close(lease_fd)
    registrations: list[Registration] = []
    try:
        registrations += [register_rank(config.register_endpoint, rank, (), TIMEOUT_S) for rank in ranks]
        wait_for(handle.is_ready, "the worker's readiness", TIMEOUT_S)
        yield Engine(handle, store, [], [], config)
    finally:
        handle.shutdown()
        for one in registrations:
            one.close()


class GpuRankProcess:
    """A rank in a process of its own: gpu_rank_main.py fills, registers and shows its blocks."""

    def __init__(self, endpoint: str, tp_rank: int, seed: int, device: str) -> None:
        script = Path(__file__).with_name("gpu_rank_main.py")
        command = [sys.executable, str(script), endpoint, str(tp_rank), str(seed), device]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, command: str) -> np.ndarray:
        """Answer to a command: an array that the process saved."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return np.load(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
