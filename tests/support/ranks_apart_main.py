"""A part of an engine in a process of its own: ranks_apart_main.py <server> <directory> [<port>]

One command a line on stdin, one answer a line on stdout; ends with stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine import BLOCK, environment, small_memory, small_model

from flexkv_radix import CacheConfig, KVManager, KVTPClient


class Part:
    """What a test may ask for."""

    def __init__(self, server_name: str, directory: Path, port: str = "") -> None:
        self._port, self._memory = port, small_memory()
        self._manager: KVManager | None = None
        self._rank = KVTPClient(port or f"ipc://{directory}/flexkv_gpu_register", 0, 0)

    def manager(self) -> str:
        self._manager = KVManager(small_model(), CacheConfig(BLOCK), gpu_register_port=self._port)
        self._manager.start()
        return "made"

    def ready(self) -> str:
        assert self._manager is not None
        return str(self._manager.is_ready())

    def rank(self) -> str:
        self._rank.register_to_server(self._memory.tensors, self._memory.layout)
        return "made"

    def error(self) -> str:
        return self._rank.error

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
        self._rank.close()


def main() -> None:
    server_name, directory, *port = sys.argv[1:]
    with environment(server_name, f"ipc://{directory}/flexkv"):
        part = Part(server_name, Path(directory), *port)
        while command := sys.stdin.buffer.raw.readline().decode().strip():
            print(getattr(part, command)(), flush=True)
        part.close()


if __name__ == "__main__":
    main()
