"""KV events of the shared tier as a router hears them: by vLLM's own types, and in Dynamo's own indexer."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from real_engines import (
    DYNAMO,
    VLLM,
    EngineProcess,
    MakeEngine,
    MakeServer,
    Prompts,
    RadixServer,
    free_port,
    python_of,
    wait_until,
)

from flexkv_radix.events import AllBlocksCleared, BlockRemoved, BlockStored
from flexkv_radix.kv_events import ZmqEventPublisher
from radixshmem import RadixClient

pytestmark = pytest.mark.engines(VLLM)

BLOCK = 32
TRANSFER = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}


class Indexer:
    """`python -m dynamo.indexer`, which subscribes to engines and answers over HTTP."""

    def __init__(self, log: Path) -> None:
        self._port = free_port()
        command = [python_of(DYNAMO), "-m", "dynamo.indexer", "--port", str(self._port)]
        self.log = log
        with log.open("w") as log_file:
            self._process = subprocess.Popen(command, stdout=log_file, stderr=log_file)
        wait_until(self._serves, "the indexer answers")

    def _serves(self) -> bool:
        try:
            self._get("workers")
        except OSError:
            return False
        return True

    def register(self, number: int, endpoint: str, replay_endpoint: str) -> None:
        """Listen to the events of an engine, and ask for those that were missed."""
        self._get(
            "register",
            {
                "instance_id": number,
                "endpoint": endpoint,
                "replay_endpoint": replay_endpoint,
                "model_name": "default",
                "block_size": BLOCK,
            },
        )

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
    indexer = Indexer(tmp_path / "indexer.log")
    yield indexer
    indexer.close()


@dataclass
class Telling:
    """An engine that publishes its events."""

    server: RadixServer
    engine: EngineProcess
    port: int
    replay_port: int


@pytest.fixture(scope="module")
def telling(make_engine: MakeEngine, make_server: MakeServer) -> Telling:
    server, port, replay_port = make_server("8M"), free_port(), free_port()  # 128 blocks
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    engine = make_engine(VLLM, server, kv_transfer_config=TRANSFER, kv_events_config=events)
    return Telling(server, engine, port, replay_port)


def reset(server: RadixServer) -> None:
    with RadixClient(server.name) as client:
        client.wait_ready(10)
        client.reset()


@pytest.mark.engines(DYNAMO)
def test_a_router_knows_what_the_shared_tier_holds(
    indexer: Indexer, telling: Telling, prompts: Prompts
) -> None:
    """Stored when published, gone when evicted, gone on reset; the engine tells on its next step.

    The indexer listens before the engine is there, and gets by replay what it missed meanwhile.
    """
    indexer.register(1, f"tcp://127.0.0.1:{telling.port}", f"tcp://127.0.0.1:{telling.replay_port}")
    engine = telling.engine
    first, *more = prompts(31, 320, *[640] * 8)
    others = iter(prompts(32, *[64] * 1000))

    def knows(prompt: list[int], num_tokens: int) -> bool:
        engine.generate(next(others), num_tokens=1)  # a step, and a store whose event closes any gap
        return indexer.host_tokens(prompt).get("1", 0) == num_tokens

    engine.generate(first)
    wait_until(lambda: knows(first, 320), "the indexer knows the prompt")
    engine.generate(*more)  # 160 blocks
    wait_until(lambda: knows(first, 0), "the indexer forgot what was evicted")
    engine.generate(first)
    wait_until(lambda: knows(first, 320), "the indexer knows the prompt again")
    reset(telling.server)
    wait_until(lambda: knows(first, 0), "the indexer was told of the reset")


@dataclass
class Router:
    """What a subscriber makes of the events: hash -> (parent, tokens)."""

    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)

    def hear(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        assert event["medium"] == "CPU"
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            for block_hash in hashes:
                del self.blocks[block_hash]  # KeyError: it was never announced
            return
        assert event["block_size"] == BLOCK
        parents = [event.get("parent_block_hash"), *hashes[:-1]]
        for number, (block_hash, parent) in enumerate(zip(hashes, parents, strict=True)):
            assert 0 <= block_hash < 1 << 64
            assert parent is None or parent in self.blocks
            tokens = tuple(event["token_ids"][number * BLOCK : (number + 1) * BLOCK])
            self.blocks[block_hash] = (parent, tokens)

    def num_known(self, prompt: list[int]) -> int:
        """Blocks of the prompt, from its start."""
        children = {block: block_hash for block_hash, block in self.blocks.items()}
        parent: int | None = None
        for start in range(0, len(prompt), BLOCK):
            found = children.get((parent, tuple(prompt[start : start + BLOCK])))
            if found is None:
                return start // BLOCK
            parent = found
        return len(prompt) // BLOCK


@pytest.fixture(scope="module")
def subscriber(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """vllm_subscriber.py in vLLM's environment."""
    log = tmp_path_factory.mktemp("subscriber") / "log"
    subscriber = EngineProcess(VLLM, {}, log, script="vllm_subscriber.py")
    yield subscriber
    subscriber.close()


def test_vllms_types_read_what_the_engine_says(
    telling: Telling, subscriber: EngineProcess, prompts: Prompts
) -> None:
    """From the first batch on, by replay: prompts that are in the cache are known, those evicted are not."""
    engine = telling.engine.await_start()  # it brings the geometry of the regions that are reset
    old, *more = prompts(33, 320, *[640] * 8)
    step = prompts(34, 20)[0]
    reset(telling.server)
    engine.generate(old, *more)

    def heard() -> Router:
        engine.generate(step, num_tokens=1)
        router = Router()
        found = subscriber.call("replay", endpoint=f"tcp://127.0.0.1:{telling.replay_port}")
        assert [sequence for sequence, _, _ in found] == list(range(len(found)))
        for _, rank, events in found:
            assert rank == 0
            for event in events:
                router.hear(event)
        return router

    wait_until(lambda: heard().num_known(more[-1]) == 640 // BLOCK, "the last prompt is announced")
    router = heard()
    assert router.num_known(old) == 0
    with RadixClient(telling.server.name) as client:
        client.wait_ready(10)
        assert len(router.blocks) == client.stats()["pool"]["full"]["num_published"]
    reset(telling.server)
    wait_until(lambda: heard().blocks == {}, "all is withdrawn")


def test_vllms_types_read_what_our_publisher_says(subscriber: EngineProcess) -> None:
    """Live and by replay, every kind of event."""
    tokens = list(range(2 * BLOCK))
    sent = [
        [BlockStored([2**64 - 1, 7], None, tokens, BLOCK)],
        [BlockStored([8], 7, tokens[:BLOCK], BLOCK), BlockRemoved([2**64 - 1])],
        [AllBlocksCleared()],
    ]
    with ZmqEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", dp_rank=3) as publisher:
        subscriber.call("subscribe", endpoint=publisher.endpoint)
        early = count()

        def is_subscribed() -> bool:
            next(early)
            publisher([AllBlocksCleared()])
            return bool(subscriber.call("hears", timeout_ms=100))

        wait_until(is_subscribed, "the subscription has arrived at the publisher")
        for events in sent:
            publisher(events)
        last = next(early) + len(sent) - 1
        heard = subscriber.call("hear", last=last)
        first = heard[0][0]
        assert subscriber.call("replay", endpoint=publisher.replay_endpoint)[first:] == heard
    assert [(sequence, rank) for sequence, rank, _ in heard] == [(n, 3) for n in range(first, last + 1)]
    stored, (more, removed), cleared = (events for _, _, events in heard[-len(sent) :])
    assert stored[0]["block_hashes"] == [2**64 - 1, 7]
    assert stored[0]["token_ids"] == tokens
    assert (more["parent_block_hash"], more["medium"]) == (7, "CPU")
    assert removed["block_hashes"] == [2**64 - 1]
    assert cleared == [{"type": "AllBlocksCleared"}]
