"""KV events of the shared tier, as a router hears them: vLLM's own publisher into Dynamo's own indexer."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engines import DYNAMO, VLLM, MakeEngine, MakeServer, Prompts, python_of, wait_until

from radixshmem import RadixClient

BLOCK = 32
TRANSFER = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Indexer:
    """`python -m dynamo.indexer`, which subscribes to engines and answers over HTTP."""

    def __init__(self, log: Path, *endpoints: str) -> None:
        workers = ",".join(f"{number}={endpoint}" for number, endpoint in enumerate(endpoints, start=1))
        self._port = free_port()
        command = [
            python_of(DYNAMO), "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(self._port),
            "--workers", workers,
        ]  # fmt: skip
        with log.open("w") as log_file:
            self._process = subprocess.Popen(command, stdout=log_file, stderr=log_file)
        wait_until(self._serves, "the indexer listens to its workers")

    def _serves(self) -> bool:
        try:
            workers = self._get("workers")
        except OSError:
            return False
        return bool(workers) and all(worker["status"] == "active" for worker in workers)

    def host_tokens(self, prompt: list[int]) -> dict[str, int]:
        """Per worker, the tokens of prompt that it has in host memory."""
        answer = self._get("query", {"token_ids": prompt, "model_name": "default"})
        return {number: worker["cpu"] for number, worker in answer["instances"].items()}

    def _get(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    indexer = Indexer(tmp_path / "indexer.log", f"tcp://127.0.0.1:{EVENTS_PORT}")
    yield indexer
    indexer.close()


EVENTS_PORT = free_port()


def test_a_router_knows_what_the_shared_tier_holds(
    indexer: Indexer, make_engine: MakeEngine, make_server: MakeServer, prompts: Prompts
) -> None:
    """Stored when published, gone when evicted, gone on reset; the engine tells on its next step."""
    server = make_server("8M")  # 128 blocks
    engine = make_engine(
        VLLM,
        server,
        kv_transfer_config=TRANSFER,
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{EVENTS_PORT}",
        },
    )
    first, other, *more = prompts(31, 320, 64, *[640] * 8)

    def knows(prompt: list[int], num_tokens: int) -> bool:
        engine.generate(other, num_tokens=1)  # a step, with which events travel
        return indexer.host_tokens(prompt).get("1", 0) == num_tokens

    engine.generate(first)
    wait_until(lambda: knows(first, 320), "the indexer knows the prompt")
    engine.generate(*more)  # 160 blocks
    wait_until(lambda: knows(first, 0), "the indexer forgot what was evicted")
    engine.generate(first)
    wait_until(lambda: knows(first, 320), "the indexer knows the prompt again")
    with RadixClient(server.name) as client:
        client.wait_ready(10)
        client.reset()
    wait_until(lambda: knows(first, 0), "the indexer was told of the reset")
