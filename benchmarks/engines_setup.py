"""What the benchmarks of real engines have in common: servers, engines, waiting for stores."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from real_engines import SCRIPTS, VLLM, EngineProcess, RadixServer, closing_all, python_of, wait_until

from radixshmem import RadixClient

BLOCK = 32
OURS = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}


class Bench:
    """Engines and servers of one run, which end with it."""

    def __init__(self, directory: Path, members: list[Any], *model_flags: str) -> None:
        self._directory, self._members = directory, members
        self.model = str(directory / "model")
        command = [python_of(VLLM), SCRIPTS / "tiny_llama.py", self.model, *model_flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def server(self, data_bytes: str) -> RadixServer:
        self._members.append(RadixServer(self._log(), data_bytes))
        server: RadixServer = self._members[-1]
        return server

    def engine(self, server: RadixServer | None, **options: Any) -> EngineProcess:
        names = {"FLEXKV_RADIXSHMEM_SERVER_NAME": server.name} if server else {}
        if server is not None:
            options["kv_transfer_config"] = OURS
        self._members.append(EngineProcess(VLLM, {"model": self.model} | options, self._log(), names))
        engine: EngineProcess = self._members[-1]
        return engine

    def _log(self) -> Path:
        return self._directory / f"{len(self._members)}.log"


@contextlib.contextmanager
def bench(*model_flags: str) -> Iterator[Bench]:
    """A Bench with a tiny Llama of the shape that model_flags give."""
    with tempfile.TemporaryDirectory() as directory, closing_all() as members:
        yield Bench(Path(directory), members, *model_flags)


class Stores:
    """Waits until what engines stored can be found."""

    def __init__(self, server: RadixServer) -> None:
        self._name = server.name
        self._num_blocks = 0

    def expect(self, prompt: list[int], num_output_tokens: int) -> None:
        """A request that was new to the cache has ended."""
        self._num_blocks += (len(prompt) + num_output_tokens - 1) // BLOCK
        with RadixClient(self._name) as client:
            client.wait_ready(30)
            wait_until(
                lambda: client.stats()["inserted_blocks"]["full"] >= self._num_blocks, "the prompt is stored"
            )
