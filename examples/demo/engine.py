"""One engine process: reads requests (JSON lines) from stdin, answers each with a JSON line on stdout.

It ends when stdin does, so an engine never outlives the demo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from examples.demo.prefix_cache import Loaded, PrefixCache
from examples.demo.transformer import Floats, Shape, Tokens, Transformer


@dataclass(frozen=True)
class Request:
    """A prompt and how to treat it.  ``zero_kv`` wipes what was read from the cache before it is used."""

    prompt: str
    num_output_tokens: int
    use_cache: bool = True
    zero_kv: bool = False


@dataclass(frozen=True)
class Answer:
    """What the model said, and what the cache did for it."""

    output: list[int]
    logits: list[float]  # after the prompt
    prefill_s: float  # from the request to the first token; cache lookup and copy included
    num_tokens: int
    num_asked_blocks: int
    num_hit_blocks: int
    num_foreign_blocks: int
    num_stored_blocks: int
    block_bytes: int


class Prefill(NamedTuple):
    """A prompt that was read: logits after it, how long that took, and what the cache had to do with it."""

    logits: Floats
    seconds: float
    loaded: Loaded
    num_stored_blocks: int


class Engine:
    """A transformer with its own KV array, in front of the node's shared cache."""

    def __init__(self, server: str, label: str) -> None:
        self.model = Transformer(Shape())
        self.cache = PrefixCache(server, self.model.shape, label)
        self.model.prefill(np.zeros(256, np.int64), self.model.new_kv())  # warm up before any clock runs

    def serve(self, request: Request) -> Answer:
        """Run one request from prompt to output."""
        tokens = np.frombuffer(request.prompt.encode(), np.uint8).astype(np.int64)
        kv = self.model.new_kv()
        prefill = (
            self._prefill_cached(tokens, kv, request.zero_kv)
            if request.use_cache
            else self._prefill(tokens, kv)
        )
        return Answer(
            output=self.model.decode(prefill.logits, kv, len(tokens), request.num_output_tokens),
            logits=prefill.logits.tolist(),
            prefill_s=prefill.seconds,
            num_tokens=len(tokens),
            num_asked_blocks=prefill.loaded.num_asked_blocks,
            num_hit_blocks=prefill.loaded.num_blocks,
            num_foreign_blocks=prefill.loaded.num_foreign_blocks,
            num_stored_blocks=prefill.num_stored_blocks,
            block_bytes=self.cache.block_bytes,
        )

    def _prefill(self, tokens: Tokens, kv: Floats) -> Prefill:
        start = time.perf_counter()
        logits = self.model.prefill(tokens, kv)
        return Prefill(logits, time.perf_counter() - start, Loaded(0, 0, 0), 0)

    def _prefill_cached(self, tokens: Tokens, kv: Floats, zero_kv: bool) -> Prefill:
        start = time.perf_counter()
        match, loaded = self.cache.find(tokens)
        with match:  # the pin keeps the prefix until what continues it is published
            self.cache.load(match, kv)
            if zero_kv:
                kv[:] = 0
            logits = self.model.prefill(tokens, kv, loaded.num_blocks * self.cache.block_size)
            seconds = time.perf_counter() - start
            # KV that was computed from wiped KV must never reach anybody else.
            num_stored = 0 if zero_kv else self.cache.store(tokens, kv, loaded.num_blocks)
        return Prefill(logits, seconds, loaded, num_stored)


def main() -> None:
    """Serve stdin until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="name of the radix-server")
    parser.add_argument("--label", required=True, help="how this engine shows in radixctl clients")
    arguments = parser.parse_args()
    engine = Engine(arguments.server, arguments.label)
    with engine.cache.client:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            answer = engine.serve(Request(**json.loads(line)))
            print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main()
