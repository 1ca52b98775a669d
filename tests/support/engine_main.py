"""An engine in a process of its own, driven over a pipe: python engine_main.py <server> <directory> <dp id>.

One JSON list a line on stdin, [verb, arguments...]; one JSON value a line on stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from engine import BLOCK, Engine, Tokens, small_engine

from flexkv_radix import CacheConfig


class Commands:
    """What a test may ask of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ready(self) -> int:
        self._engine.wait_ready()
        return self._engine.cache.num_cpu_blocks

    def put(self, tokens: list[int], blocks: list[int]) -> int:
        return self._engine.put(_array(tokens), blocks)

    def get(self, tokens: list[int], blocks: list[int]) -> int:
        return self._engine.get(_array(tokens), blocks)

    def match(self, tokens: list[int]) -> int:
        """Matches and keeps the pin."""
        return int(self._engine.manager.get_match(_array(tokens))[1].sum())

    def stage(self, tokens: list[int]) -> int:
        """Stages slots and keeps them."""
        return int(self._engine.manager.put_match(_array(tokens))[1].sum())

    def put_forever(self, tokens: list[int], blocks: list[int]) -> int:
        """Stores the same prompt in ever new namespaces; the answer never comes."""
        array, turn = _array(tokens), 0
        while True:
            self._engine.compute(array, blocks)
            task_id, mask = self._engine.manager.put_match(array, namespace=[str(turn)])
            if mask.any():
                self._engine.manager.launch([task_id], [self._engine.slots(self._engine.moved(mask, blocks))])
            self._engine.manager.wait([task_id])
            turn += 1

    def reset(self) -> int:
        self._engine.manager.reset()
        return 0

    def shutdown(self) -> int:
        self._engine.manager.shutdown()
        return 0

    def fork(self, by_hand: bool) -> int:
        """Id of a child that lives until it is killed.  by_hand: the interpreter does not know of it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there are threads
            pid = ctypes.PyDLL(None).fork() if by_hand else os.fork()
        while pid == 0:
            signal.pause()
        return int(pid)

    def disabled(self) -> str:
        return self._engine.manager.disabled

    def rank_error(self) -> str:
        return self._engine.clients[0].error

    def worker_pid(self) -> int:
        """0 while there is none."""
        worker = self._engine.manager._backend._driver.worker  # type: ignore[attr-defined]
        return int(worker.pid or 0) if worker is not None else 0


def _array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)


def main() -> None:
    server_name, directory, dp_client_id, *identity = sys.argv[1:]
    cache = CacheConfig(BLOCK, model_identity=identity[0] if identity else "")
    more = {key: value for key, value in os.environ.items() if key.startswith("FLEXKV_")}
    with small_engine(
        server_name, Path(directory), dp_client_id=int(dp_client_id), cache=cache, environ=more
    ) as engine:
        commands = Commands(engine)
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            answer: Any = getattr(commands, verb)(*arguments)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
