"""Two processes share a prompt: one stores its blocks, the other reads them.

    python examples/shared_prompt.py

Neither process sends the other anything.  Both know the prompt, so both compute the same block hashes,
and the index in shared memory leads from a hash to the slot with the bytes.
"""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
from numpy.typing import NDArray

from radixshmem import Geometry, RadixClient, RadixServer, ServerConfig, hash_blocks

BLOCK_TOKENS = 16
SLOT_BYTES = 64 << 10
NUM_BLOCKS = 64
GEOMETRY = Geometry(BLOCK_TOKENS, SLOT_BYTES, fingerprint="shared_prompt example")


def make_prompt() -> NDArray[np.int64]:
    """The token ids that both engines get."""
    return np.random.default_rng(0).integers(0, 50_000, NUM_BLOCKS * BLOCK_TOKENS)


def kv_of(block_tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Stands in for a model: bytes that depend on the block's tokens."""
    return np.random.default_rng(block_tokens).integers(0, 256, SLOT_BYTES, np.uint8)


def store(server: str) -> None:
    """The first engine: computes the prompt's KV and publishes it."""
    blocks = make_prompt().reshape(NUM_BLOCKS, BLOCK_TOKENS)
    with RadixClient(server, GEOMETRY, label="storing engine") as client:
        client.wait_ready()
        slots = client.allocate_slots(NUM_BLOCKS)
        for tokens, slot in zip(blocks, slots.tolist(), strict=True):
            client.slot_view(slot)[:] = kv_of(tokens).data
        result = client.insert(hash_blocks(blocks.ravel(), BLOCK_TOKENS), slots)
        print(f"process {os.getpid()} stored {result.num_inserted} blocks")


def read(server: str) -> None:
    """The second engine: finds the blocks and checks every byte."""
    blocks = make_prompt().reshape(NUM_BLOCKS, BLOCK_TOKENS)
    with RadixClient(server, GEOMETRY, label="reading engine") as client:
        client.wait_ready()
        with client.query(hash_blocks(blocks.ravel(), BLOCK_TOKENS), lock=True) as match:
            num_right = 0
            for _, first_block, slots in match.full_fragments:
                for block, slot in enumerate(slots.tolist(), first_block):
                    num_right += bytes(client.slot_view(slot)) == kv_of(blocks[block]).tobytes()
        print(f"process {os.getpid()} found {match.common_hit} blocks, {num_right} with the right bytes")
        if num_right != NUM_BLOCKS:
            raise SystemExit(f"{NUM_BLOCKS} blocks were stored")


def main() -> None:
    """Start a server, then one engine after the other."""
    name = f"/shared-prompt-{os.getpid()}"
    spawn = multiprocessing.get_context("spawn")  # engines do not inherit the server's threads
    with RadixServer(ServerConfig(name=name, data_bytes=64 << 20, metrics_address="")):
        for engine in (store, read):
            process = spawn.Process(target=engine, args=(name,))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"the {engine.__name__} engine failed with exit code {process.exitcode}")


if __name__ == "__main__":
    main()
