"""One engine process: reads requests (JSON lines) from stdin, answers each with a JSON line on stdout.

It ends when stdin does, so an engine never outlives the demo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

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
        if request.use_cache:
            return self._serve_cached(request, tokens, kv)
        start = time.perf_counter()
        logits = self.model.prefill(tokens, kv)
        return self._answer(request, tokens, kv, logits, time.perf_counter() - start, Loaded(0, 0, 0), 0)

    def _serve_cached(self, request: Request, tokens: Tokens, kv: Floats) -> Answer:
        start = time.perf_counter()
        match, loaded = self.cache.find(tokens)
        with match:  # the pin keeps the prefix until what continues it is published
            self.cache.load(match, kv)
            if request.zero_kv:
                kv[:] = 0
            logits = self.model.prefill(tokens, kv, loaded.num_blocks * self.cache.block_size)
            prefill_s = time.perf_counter() - start
            # KV that was computed from wiped KV must never reach anybody else.
            num_stored = 0 if request.zero_kv else self.cache.store(tokens, kv, loaded.num_blocks)
        return self._answer(request, tokens, kv, logits, prefill_s, loaded, num_stored)

    def _answer(
        self,
        request: Request,
        tokens: Tokens,
        kv: Floats,
        logits: Floats,
        prefill_s: float,
        loaded: Loaded,
        num_stored: int,
    ) -> Answer:
        output = self.model.decode(logits, kv, len(tokens), request.num_output_tokens)
        return Answer(
            output=output,
            logits=logits.tolist(),
            prefill_s=prefill_s,
            num_tokens=len(tokens),
            num_asked_blocks=loaded.num_asked_blocks,
            num_hit_blocks=loaded.num_blocks,
            num_foreign_blocks=loaded.num_foreign_blocks,
            num_stored_blocks=num_stored,
            block_bytes=self.cache.block_bytes,
        )


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
