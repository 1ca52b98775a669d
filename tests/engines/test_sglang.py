"""Unmodified SGLang engines share the node's cache: outputs equal those without any cache, token for token.

Our backend in both modes, SGLang's own --enable-flexkv, and two versions.  The device cache is emptied and
refilled before hits are looked for: a flush alone would leave the KV where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from real_engines import (
    SGLANG_20,
    SGLANG_23,
    VLLM,
    EngineProcess,
    MakeEngine,
    MakeServer,
    Prompts,
    RadixServer,
    wait_until,
)

from radixshmem import ComponentType, RadixClient

OURS = {"radix_cache_backend": "radixshmem"}
LAYERWISE = {"FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1"}
PAGE = 32


@pytest.fixture(scope="module")
def server(make_server: MakeServer) -> RadixServer:
    return make_server("64M")


@pytest.fixture(scope="module", params=[SGLANG_23, SGLANG_20])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(make_engine: MakeEngine) -> EngineProcess:
    return make_engine(SGLANG_23, None)


@pytest.fixture(scope="module")
def first(make_engine: MakeEngine, server: RadixServer, version: str) -> Iterator[EngineProcess]:
    engine = make_engine(version, server, **OURS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def layerwise(make_engine: MakeEngine, server: RadixServer, version: str) -> Iterator[EngineProcess]:
    engine = make_engine(version, server, LAYERWISE, **OURS)
    yield engine
    engine.close()


@pytest.fixture
def client(server: RadixServer, first: EngineProcess) -> Iterator[RadixClient]:
    """Of an empty cache."""
    first.await_start()
    with RadixClient(server.name) as client:
        client.wait_ready(30)
        client.reset()
        yield client


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def whole_pages(prompt: list[int]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


def store(client: RadixClient, engine: EngineProcess, *prompts: list[int], **arguments: Any) -> None:
    """Let engine compute the prompts, and wait until they and their outputs are in the cache."""
    before = client.stats()["inserted_blocks"]["full"]
    outputs = engine.generate(*prompts, **arguments)
    num_blocks = sum((len(p) + len(o["tokens"]) - 1) // PAGE for p, o in zip(prompts, outputs, strict=True))
    wait_until(
        lambda: client.stats()["inserted_blocks"]["full"] >= before + num_blocks,
        f"{num_blocks} blocks are stored",
    )


def overwrite_device(engine: EngineProcess, prompts: Prompts) -> None:
    """Put other KV where the device cache had what it forgets."""
    assert engine.call("flush")
    engine.generate(*prompts(99, 900, 900, 900), num_tokens=1)
    assert engine.call("flush")


def test_prompts_of_one_engine_are_hits_in_the_other_mode(
    client: RadixClient,
    first: EngineProcess,
    layerwise: EngineProcess,
    reference: EngineProcess,
    prompts: Prompts,
) -> None:
    asked = prompts(21, 100, 500, 900)
    expected = tokens_of(reference.generate(*asked))
    store(client, first, *asked)
    outputs = layerwise.generate(*asked)
    assert tokens_of(outputs) == expected
    assert [output["num_cached"] for output in outputs] == [whole_pages(prompt) for prompt in asked]
    overwrite_device(first, prompts)
    outputs = first.generate(*asked)
    assert tokens_of(outputs) == expected
    assert [output["num_cached"] for output in outputs] == [whole_pages(prompt) for prompt in asked]


def test_what_the_layerwise_engine_stores(
    client: RadixClient,
    first: EngineProcess,
    layerwise: EngineProcess,
    reference: EngineProcess,
    prompts: Prompts,
) -> None:
    (start,) = prompts(22, 400)
    store(client, layerwise, start, num_tokens=64)
    turn = start + tokens_of(reference.generate(start, num_tokens=64))[0] + prompts(23, 40)[0]
    (output,) = first.generate(turn)
    assert output["tokens"] == tokens_of(reference.generate(turn))[0]
    assert output["num_cached"] == (400 + 63) // PAGE * PAGE


def test_an_extra_key_keeps_tenants_apart(
    client: RadixClient, first: EngineProcess, layerwise: EngineProcess, prompts: Prompts
) -> None:
    (prompt,) = prompts(24, 300)
    store(client, first, prompt, salt="one tenant")
    cached = {
        salt: layerwise.generate(prompt, salt=salt, num_tokens=1)[0]["num_cached"]
        for salt in (None, "another", "one tenant")
    }
    assert cached == {None: 0, "another": 0, "one tenant": whole_pages(prompt)}


@pytest.mark.parametrize("environment", [{}, LAYERWISE], ids=["at once", "layerwise"])
def test_the_engines_own_flexkv_hook(
    client: RadixClient,
    first: EngineProcess,
    reference: EngineProcess,
    make_engine: MakeEngine,
    server: RadixServer,
    version: str,
    environment: dict[str, str],
    prompts: Prompts,
) -> None:
    """--enable-flexkv runs on this package, and shares with our backend."""
    asked = prompts(25 + len(environment), 300, 600)
    expected = tokens_of(reference.generate(*asked))
    engine = make_engine(version, server, environment, enable_flexkv=True)
    store(client, first, asked[0])
    store(client, engine, asked[1])
    overwrite_device(engine, prompts)
    outputs = engine.generate(*asked)
    assert tokens_of(outputs) == expected
    assert [output["num_cached"] for output in outputs] == [whole_pages(prompt) for prompt in asked]
    assert first.generate(asked[1])[0]["num_cached"] == whole_pages(asked[1])
    engine.close()


def test_outputs_depend_on_what_is_loaded(
    client: RadixClient,
    first: EngineProcess,
    layerwise: EngineProcess,
    reference: EngineProcess,
    prompts: Prompts,
) -> None:
    """The control of all tests here: with the slots zeroed, a hit changes the output."""
    (prompt,) = prompts(27, 600)
    store(client, first, prompt)
    client.store.array(ComponentType.FULL)[:] = 0
    (output,) = layerwise.generate(prompt)
    client.reset()
    assert output["num_cached"] == whole_pages(prompt)
    assert output["tokens"] != tokens_of(reference.generate(prompt))[0]


def test_a_vllm_engine_is_refused_and_serves_without(
    client: RadixClient, first: EngineProcess, make_engine: MakeEngine, server: RadixServer, prompts: Prompts
) -> None:
    """Its blocks have another format: one warning tells both sides, and nothing is shared."""
    asked = prompts(28, 300)
    transfer = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}
    other = make_engine(VLLM, server, kv_transfer_config=transfer)
    store(client, first, *asked)
    expected = tokens_of(first.generate(*asked))
    outputs = other.generate(*asked)
    assert tokens_of(outputs) == expected
    assert outputs[0]["num_cached"] == 0
    log = other.log.read_text()
    assert log.count("running without the KV cache") == 1
    assert "fingerprint" in log
    other.close()
