"""How an engine uses the node's cache: find the known prefix, copy it in, publish what was computed."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from examples.demo.transformer import Floats, Shape, Tokens
from radixshmem import Geometry, QueryResult, RadixClient, ServerUnavailable, hash_blocks

CONNECT_DEADLINE_S = 20.0


class Loaded(NamedTuple):
    """What a prompt found in the cache."""

    num_blocks: int
    num_foreign_blocks: int  # of these, blocks that another engine stored
    num_asked_blocks: int


class PrefixCache:
    """The shared cache as one engine sees it: a slot holds the keys and values of one block of tokens."""

    def __init__(self, server: str, shape: Shape, label: str) -> None:
        self.block_size = shape.chunk_tokens
        self._slot_shape = shape.kv_shape(self.block_size)
        self.block_bytes = int(np.prod(self._slot_shape)) * np.dtype(np.float32).itemsize
        geometry = Geometry(self.block_size, self.block_bytes, fingerprint=_fingerprint(shape))
        self.client = _connect(server, geometry, label)
        self.client.wait_ready()
        self._stored: set[int] = set()

    def find(self, tokens: Tokens) -> tuple[QueryResult, Loaded]:
        """Look up ``tokens`` and pin what is known of them.

        The last token is left out: it has to be computed in any case, for the logits after it.
        """
        hashes = hash_blocks(tokens[:-1], self.block_size)
        match = self.client.query(hashes, lock=True)
        known = hashes[: match.common_hit].tolist()
        foreign = sum(block not in self._stored for block in known)
        return match, Loaded(match.common_hit, foreign, len(hashes))

    def load(self, match: QueryResult, kv: Floats) -> None:
        """Copy the pinned blocks into the engine's own ``kv``."""
        for _, first_block, slots in match.full_fragments:
            for block, slot in enumerate(slots.tolist(), first_block):
                kv[:, :, self._tokens_of(block)] = self._slot(slot)

    def store(self, tokens: Tokens, kv: Floats, first_block: int) -> int:
        """Publish the blocks of ``tokens`` from ``first_block`` on, once their bytes are in place."""
        hashes = hash_blocks(tokens[:-1], self.block_size)
        slots = self.client.allocate_slots(len(hashes) - first_block)
        for block, slot in enumerate(slots.tolist(), first_block):
            self._slot(slot)[:] = kv[:, :, self._tokens_of(block)]
        end = first_block + len(slots)
        result = self.client.insert(hashes[:end], slots, start=first_block)
        self._stored.update(hashes[end - result.num_inserted : end].tolist())
        return result.num_inserted

    def _slot(self, slot: int) -> Floats:
        bytes_of_slot = self.client.slot_view(slot)[: self.block_bytes]
        return np.frombuffer(bytes_of_slot, np.float32).reshape(self._slot_shape)

    def _tokens_of(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


def _fingerprint(shape: Shape) -> str:
    """What the bytes mean: engines whose models differ must not read each other's."""
    return f"demo seed {shape.seed} float32 {shape.num_layers}x2x{shape.num_heads}x{shape.head_dim}"


def _connect(server: str, geometry: Geometry, label: str) -> RadixClient:
    """A client, also when the engine is up before its server: retrying is the client's business."""
    deadline = time.monotonic() + CONNECT_DEADLINE_S
    while True:
        try:
            return RadixClient(server, geometry, label=label)
        except ServerUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
