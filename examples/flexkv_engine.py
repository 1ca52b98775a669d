"""A stand-in for an inference engine in the flexkv_* examples: its KV is a function of the tokens.

    python examples/flexkv_engine.py <dp_client_id> <prompt seed> <prompt seed> ...

For each prompt it loads what the cache has, checks it, "computes" the rest and stores that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from flexkv_radix import CacheConfig, KVCacheLayout, KVCacheLayoutType, KVManager, KVTPClient, ModelConfig
from flexkv_radix.settings import load_settings
from flexkv_radix.start import gpu_register_port_of

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 4, 64, 16, 2, 8
PROMPT_BLOCKS = 12


class Engine:
    """One rank; prompts are computed in the blocks 0..11 of its KV tensors."""

    def __init__(self, dp_client_id: int) -> None:
        model = ModelConfig(LAYERS, HEADS, HEAD_SIZE, dtype="int64")
        self.manager = KVManager(model, CacheConfig(BLOCK_TOKENS, model_identity="sums"), dp_client_id)
        self.manager.start()
        self.kv = [
            torch.zeros(2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE, dtype=torch.int64) for _ in range(LAYERS)
        ]
        layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE)
        self.worker = KVTPClient(
            gpu_register_port_of(load_settings().server_recv_port), dp_client_id, device_id=0
        )
        self.worker.register_to_server(self.kv, layout)
        while not self.manager.is_ready():
            time.sleep(0.01)

    def serve(self, seed: int) -> str:
        """Prefill a prompt with the cache's help; says where its KV came from."""
        tokens = np.random.default_rng(seed).integers(0, 50_000, PROMPT_BLOCKS * BLOCK_TOKENS)
        for layer in self.kv:
            layer.zero_()
        task, mask = self.manager.get_match(tokens)
        if mask.any():
            self.manager.launch([task], [np.flatnonzero(mask)])
        self.manager.wait([task])
        loaded = int(mask.sum())
        if not self._holds(tokens, loaded // BLOCK_TOKENS):
            raise SystemExit(f"prompt {seed}: wrong bytes")
        self._compute(tokens, loaded // BLOCK_TOKENS)
        task, mask = self.manager.put_match(tokens)
        if mask.any():
            self.manager.launch([task], [np.flatnonzero(mask)])
        self.manager.wait([task])
        return f"prompt {seed}: loaded {loaded} tokens, computed {len(tokens) - loaded}, stored {mask.sum()}"

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.close()

    def _compute(self, tokens: np.ndarray, first_block: int) -> None:
        for layer, block, expected in self._model(tokens, range(first_block, PROMPT_BLOCKS)):
            layer[:, block] = expected

    def _holds(self, tokens: np.ndarray, num_blocks: int) -> bool:
        return all(
            bool((layer[:, block] == kv).all()) for layer, block, kv in self._model(tokens, range(num_blocks))
        )

    def _model(self, tokens: np.ndarray, blocks: range) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(layer's tensor, block, value everywhere in it): the sum of all tokens up to the block's end."""
        for number, layer in enumerate(self.kv):
            for block in blocks:
                yield layer, block, int(tokens[: (block + 1) * BLOCK_TOKENS].sum()) * (number + 1)


def main() -> None:
    dp_client_id, *seeds = map(int, sys.argv[1:])
    engine = Engine(dp_client_id)
    for seed in seeds:
        print(f"process {os.getpid()}, {engine.serve(seed)}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
