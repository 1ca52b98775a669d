"""A node of SGLang engines for the end-to-end tests: each way to use the cache, and an engine without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from real_engines import (
    SGLANG_20,
    SGLANG_23,
    EngineProcess,
    MakeEngine,
    MakeServer,
    Prompts,
    RadixServer,
    free_port,
    wait_until,
)

from radixshmem import RadixClient

PAGE = 32
TRANSFER_WORKER = "flexkv_radix.transfer.worker"
OURS, OURS_LAYERWISE = "our backend", "our backend, layerwise"
HOOK, HOOK_LAYERWISE = "SGLang's hook", "SGLang's hook, layerwise"
_LAYERWISE = {"FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1"}
_BACKEND: dict[str, Any] = {"radix_cache_backend": "radixshmem"}
_HOOK: dict[str, Any] = {"enable_flexkv": True}
WAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    OURS: ({}, _BACKEND),
    OURS_LAYERWISE: (_LAYERWISE, _BACKEND),
    HOOK: ({}, _HOOK),
    HOOK_LAYERWISE: (_LAYERWISE, _HOOK),
}
WAYS_OF = {SGLANG_23: list(WAYS), SGLANG_20: [OURS, HOOK_LAYERWISE]}


@dataclass
class Node:
    """A radix-server, engines of one version by way, and one without cache to compare with."""

    version: str
    server: RadixServer
    reference: EngineProcess
    engines: dict[str, EngineProcess]

    def pairs(self) -> list[tuple[EngineProcess, EngineProcess]]:
        """Each engine with the next one, the last with the first."""
        engines = list(self.engines.values())
        return list(zip(engines, [*engines[1:], engines[0]], strict=True))

    def ours(self) -> list[EngineProcess]:
        return [engine for way, engine in self.engines.items() if way in (OURS, OURS_LAYERWISE)]

    def expected(self, *prompts: list[int], **arguments: Any) -> list[list[int]]:
        return tokens_of(self.reference.generate(*prompts, **arguments))


def make_node(version: str, make_server: MakeServer, make_engine: MakeEngine) -> Node:
    """Start it all; the pool is small, so that the tests evict."""
    server = make_server("16M")
    reference = make_engine(version, None, disable_radix_cache=True)
    engines = {
        way: start(make_engine, version, server, way, **({"events_port": free_port()} if way == OURS else {}))
        for way in WAYS_OF[version]
    }
    return Node(version, server, reference, engines)


def start(
    make_engine: MakeEngine, version: str, server: RadixServer, way: str, **options: Any
) -> EngineProcess:
    environment, flags = WAYS[way]
    return make_engine(version, server, environment, **flags, **options)


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def cached_of(outputs: list[dict[str, Any]]) -> list[int]:
    return [output["num_cached"] for output in outputs]


def whole_pages(prompt: list[int]) -> int:
    """Tokens of the prompt that can be had from a cache: at least one is computed."""
    return (len(prompt) - 1) // PAGE * PAGE


def num_inserted(client: RadixClient) -> int:
    return int(client.stats()["inserted_blocks"]["full"])


def num_evicted(client: RadixClient) -> int:
    return sum(client.stats()["evicted_blocks"]["full"].values())


def pool(client: RadixClient) -> dict[str, int]:
    counts: dict[str, int] = client.stats()["pool"]["full"]
    return counts


def store(client: RadixClient, engine: EngineProcess, *prompts: list[int], **arguments: Any) -> None:
    """Let engine compute the prompts, and wait until they and their outputs are in the cache."""
    before = num_inserted(client)
    outputs = engine.generate(*prompts, **arguments)
    num_blocks = sum((len(p) + len(o["tokens"]) - 1) // PAGE for p, o in zip(prompts, outputs, strict=True))
    wait_until(lambda: num_inserted(client) >= before + num_blocks, f"{num_blocks} blocks are stored")


def overwrite_device(engine: EngineProcess, prompts: Prompts) -> None:
    """Put other KV where the device cache had what it forgets: a flush alone leaves it where it was."""
    flush(engine)
    engine.generate(*prompts(99, 900, 900, 900), num_tokens=1)
    flush(engine)


def flush(engine: EngineProcess) -> None:
    """Empty the device cache, once the engine has put away the request that it just answered."""
    wait_until(lambda: bool(engine.call("flush")), "the device cache is emptied")
