"""What an engine with FlexKV calls does, on CPU tensors: python examples/flexkv_round_trip.py"""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
import torch

from flexkv_radix import CacheConfig, KVCacheLayout, KVCacheLayoutType, KVManager, KVTPClient, ModelConfig
from radixshmem import RadixServer, ServerConfig

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 4, 64, 16, 2, 8


def main() -> None:
    name = f"/flexkv-example-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as directory,
        # Usually an operator runs this part: radix-server --name /flexkv --data-bytes 64G
        RadixServer(ServerConfig(name=name, data_bytes=8 << 20, metrics_address="")),
    ):
        os.environ["FLEXKV_RADIXSHMEM_SERVER_NAME"] = name
        os.environ["FLEXKV_SERVER_RECV_PORT"] = f"ipc://{directory}/flexkv"
        run(f"ipc://{directory}/flexkv")


def run(port: str) -> None:
    # The scheduler has the manager, each worker hands its KV tensors over; here both are one process.
    model = ModelConfig(LAYERS, HEADS, HEAD_SIZE, dtype="float32")
    manager = KVManager(model, CacheConfig(BLOCK_TOKENS, model_identity="16 tokens of noise"))
    manager.start()
    kv = [torch.randn(2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE) for _ in range(LAYERS)]
    layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE)
    worker = KVTPClient(f"{port}_gpu_register", dp_client_id=0, device_id=0)
    worker.register_to_server(kv, layout)
    while not manager.is_ready():
        time.sleep(0.01)

    # After a prefill: store what is not stored yet.  The prompt's first six blocks lie in slots 0..95.
    prompt = np.arange(100)
    task, mask = manager.put_match(prompt)
    manager.launch([task], [np.flatnonzero(mask)])
    print(f"stored {mask.sum()} of {len(prompt)} tokens: {manager.wait(task)[task].status.value}")

    # Another request that begins alike: load what is stored to the engine's blocks 20.. .
    longer = np.concatenate([prompt[:64], np.full(64, 7)])
    task, mask = manager.get_match(longer)
    manager.launch([task], [20 * BLOCK_TOKENS + np.arange(mask.sum())])
    print(f"loaded {mask.sum()} of {len(longer)} tokens: {manager.wait(task)[task].status.value}")
    same = all(torch.equal(layer[:, 20:24], layer[:, 0:4]) for layer in kv)
    print(f"the bytes are {'those that were stored' if same else 'WRONG'}")

    manager.shutdown()
    worker.close()


if __name__ == "__main__":
    main()
