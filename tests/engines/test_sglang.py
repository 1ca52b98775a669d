"""Unmodified SGLang engines share the node's cache: outputs equal those without any cache, token for token.

Two versions; our backend and SGLang's own --enable-flexkv, both at once and layer by layer.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from real_engines import (
    SGLANG_20,
    SGLANG_23,
    VLLM,
    MakeEngine,
    MakeServer,
    Prompts,
    wait_until,
)
from sglang_node import (
    HOOK,
    HOOK_LAYERWISE,
    OURS,
    OURS_LAYERWISE,
    TRANSFER_WORKER,
    WAYS,
    Node,
    cached_of,
    make_node,
    num_evicted,
    num_inserted,
    overwrite_device,
    pool,
    start,
    store,
    tokens_of,
    whole_pages,
)

from radixshmem import ComponentType, RadixClient

OTHER_ROPE = '{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}'

latest_alone = pytest.mark.parametrize("node", [SGLANG_23], indirect=True)


@pytest.fixture(scope="module", params=[SGLANG_23, SGLANG_20])
def node(request: pytest.FixtureRequest, make_server: MakeServer, make_engine: MakeEngine) -> Iterator[Node]:
    node = make_node(str(request.param), make_server, make_engine)
    for engine in (node.reference, *node.engines.values()):
        engine.await_start()
    yield node
    for engine in (node.reference, *node.engines.values()):
        engine.close()


@pytest.fixture
def client(node: Node) -> Iterator[RadixClient]:
    """Of an empty cache."""
    with RadixClient(node.server.name) as client:
        client.wait_ready(30)
        client.reset()
        yield client


def test_prompts_of_one_engine_are_hits_in_the_next(
    node: Node, client: RadixClient, prompts: Prompts
) -> None:
    for number, (storing, loading) in enumerate(node.pairs()):
        asked = prompts(210 + number, 100, 500, 900)
        expected = node.expected(*asked)
        store(client, storing, *asked)
        outputs = loading.generate(*asked)
        assert tokens_of(outputs) == expected
        assert cached_of(outputs) == list(map(whole_pages, asked))


def test_what_the_device_forgot_is_loaded(node: Node, client: RadixClient, prompts: Prompts) -> None:
    for number, engine in enumerate(node.engines.values()):
        asked = prompts(220 + number, 300, 600)
        store(client, engine, *asked)
        overwrite_device(engine, prompts)
        outputs = engine.generate(*asked)
        assert tokens_of(outputs) == node.expected(*asked)
        assert cached_of(outputs) == list(map(whole_pages, asked))


def test_a_conversation_that_moves(node: Node, client: RadixClient, prompts: Prompts) -> None:
    """Prompt and answer of one engine are the prefix of the next one's turn."""
    for number, (storing, loading) in enumerate(node.pairs()):
        first, more = prompts(230 + number, 400, 40)
        store(client, storing, first, num_tokens=64)
        turn = first + node.expected(first, num_tokens=64)[0] + more
        (output,) = loading.generate(turn)
        assert output["tokens"] == node.expected(turn)[0]
        assert output["num_cached"] == whole_pages(turn[: 400 + 64])


@pytest.mark.parametrize("kind", ["extra_key", "cache_salt"])
def test_tenants_are_kept_apart(node: Node, client: RadixClient, prompts: Prompts, kind: str) -> None:
    """By our backend; SGLang's own hook does not look."""
    storing, loading = node.ours()[0], node.ours()[-1]
    (prompt,) = prompts(24, 300)
    store(client, storing, prompt, **{kind: "one tenant"})
    overwrite_device(loading, prompts)
    other_kind = {"extra_key": "cache_salt", "cache_salt": "extra_key"}[kind]
    asked = [{}, {kind: "another"}, {other_kind: "one tenant"}, {kind: "one tenant"}]
    cached = [loading.generate(prompt, num_tokens=1, **keys)[0]["num_cached"] for keys in asked]
    assert cached == [0, 0, 0, whole_pages(prompt)]


def test_outputs_depend_on_what_is_loaded(node: Node, client: RadixClient, prompts: Prompts) -> None:
    """The control of all tests here: with the slots zeroed, a hit changes the output."""
    for number, (storing, loading) in enumerate(node.pairs()):
        (prompt,) = prompts(270 + number, 600)
        store(client, storing, prompt)
        client.store.array(ComponentType.FULL)[:] = 0
        (output,) = loading.generate(prompt)
        client.reset()
        assert output["num_cached"] == whole_pages(prompt)
        assert output["tokens"] != node.expected(prompt)[0]


def test_events_of_the_shared_tier(node: Node, client: RadixClient, prompts: Prompts) -> None:
    """Our backend tells them among the device's: what it stored, and that a reset removed it."""
    engine, (prompt,) = node.engines[OURS], prompts(32, 320)
    heard: list[dict[str, Any]] = []

    def stored() -> list[dict[str, Any]]:
        """Since the cache was last cleared."""
        heard.extend(engine.call("events"))
        cleared = [number for number, event in enumerate(heard) if event["type"] == "AllBlocksCleared"]
        heard[:] = heard[cleared[-1] + 1 :] if cleared else heard
        return [event for event in heard if event["type"] == "BlockStored" and event["medium"] == "CPU"]

    stored()
    (output,) = engine.generate(prompt)
    wait_until(lambda: sum(len(event["block_hashes"]) for event in stored()) >= 10, "blocks are announced")
    tokens = [token for event in stored() for token in event["token_ids"]]
    assert tokens == (prompt + output["tokens"])[:320]
    hashes = [block for event in stored() for block in event["block_hashes"]]
    assert len(set(hashes)) == 10
    assert stored()[0]["parent_block_hash"] is None
    client.reset()
    wait_until(lambda: stored() == [], "they are withdrawn")


@latest_alone
def test_soak_under_eviction(node: Node, client: RadixClient, prompts: Prompts) -> None:
    """160 requests over all engines; shared prefixes, and far more blocks than the pool holds."""
    generator = random.Random(8)
    systems = prompts(280, 200, 333, 480)
    tails = prompts(281, *[generator.randrange(200, 450) for _ in range(40)])
    asked = [generator.choice(systems) + tail for tail in tails]
    expected = node.expected(*asked, num_tokens=4)
    evicted, num_cached = num_evicted(client), dict.fromkeys(node.engines, 0)
    for _ in range(4):
        batches = {way: generator.choices(range(len(asked)), k=10) for way in node.engines}
        for way, batch in batches.items():
            node.engines[way].ask("generate", prompts=[asked[i] for i in batch], num_tokens=4)
        for way, batch in batches.items():
            outputs = node.engines[way].answer()
            num_cached[way] += sum(cached_of(outputs))
            assert tokens_of(outputs) == [expected[i] for i in batch], way
    assert min(num_cached.values()) > 0
    assert num_evicted(client) > evicted + 300


@latest_alone
@pytest.mark.parametrize("way", [OURS_LAYERWISE, HOOK])
def test_requests_survive_the_death_of_the_server(
    node: Node, client: RadixClient, prompts: Prompts, way: str
) -> None:
    engine, asked = node.engines[way], prompts(29, *[400] * 6)
    expected = node.expected(*asked)
    store(client, engine, *asked[:3])
    overwrite_device(engine, prompts)
    before = num_inserted(client)
    engine.ask("generate", prompts=asked)
    node.server.kill()
    outputs = engine.answer()
    assert tokens_of(outputs) == expected
    wait_until(lambda: num_inserted(client) >= before + 3 * (415 // 32), "the rest is stored")
    node.server.start()
    overwrite_device(engine, prompts)
    outputs = engine.generate(*asked)
    assert tokens_of(outputs) == expected
    assert cached_of(outputs) == list(map(whole_pages, asked))


@latest_alone
@pytest.mark.parametrize("way", [OURS, HOOK])
def test_a_dead_transfer_worker_costs_hits_alone(
    node: Node, client: RadixClient, prompts: Prompts, way: str
) -> None:
    """Killed with a load under way: the blocks are computed instead.  Another worker brings it back."""
    engine, asked = node.engines[way], prompts(34, 600, 700)
    expected = node.expected(*asked)
    store(client, node.engines[OURS_LAYERWISE], *asked)
    (worker,) = engine.processes(TRANSFER_WORKER)
    os.kill(worker, signal.SIGSTOP)
    engine.ask("generate", prompts=asked[:1])
    wait_until(lambda: pool(client)["num_pins"] > 0, "the load has begun")
    os.kill(worker, signal.SIGKILL)
    assert tokens_of(engine.answer()) == expected[:1]
    wait_until(lambda: "the KV cache is back" in engine.log.read_text(), "the worker is replaced")
    outputs = engine.generate(asked[1])
    assert (tokens_of(outputs), cached_of(outputs)) == (expected[1:], [whole_pages(asked[1])])


@latest_alone
@pytest.mark.engines(VLLM)
def test_engines_of_another_geometry_are_refused_and_serve_without(
    node: Node, client: RadixClient, prompts: Prompts, make_engine: MakeEngine
) -> None:
    """One warning tells both sides, and nothing is shared: a vLLM, and SGLangs with other pages or
    another rotary embedding."""
    transfer = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}
    others = [
        make_engine(VLLM, node.server, kv_transfer_config=transfer),
        start(make_engine, node.version, node.server, OURS_LAYERWISE, page_size=64),
        start(make_engine, node.version, node.server, HOOK_LAYERWISE, page_size=64),
        start(make_engine, node.version, node.server, OURS, json_model_override_args=OTHER_ROPE),
    ]
    refusals = ("fingerprint", "block_size=64", "block_size=64", "fingerprint")
    asked = prompts(30, 300)
    store(client, node.engines[OURS], *asked)
    before = num_inserted(client)
    for other, named in zip(others, refusals, strict=True):
        outputs = other.generate(*asked)
        assert (tokens_of(outputs) == node.expected(*asked)) == (other is not others[-1])
        assert cached_of(outputs) == [0]
        (warning,) = [line for line in other.log.read_text().splitlines() if "without the KV cache" in line]
        assert "running without the KV cache" in warning
        assert "geometry" in warning
        assert named in warning
        other.close()
    assert num_inserted(client) == before
    assert cached_of(node.engines[HOOK].generate(*asked)) == [whole_pages(asked[0])]


@latest_alone
@pytest.mark.slow
@pytest.mark.parametrize("way", [OURS, HOOK])
def test_a_strict_engine_does_not_start_without_the_cache(
    node: Node, client: RadixClient, make_engine: MakeEngine, way: str
) -> None:
    flags = {**WAYS[way][1], "page_size": 64}
    strict = make_engine(node.version, node.server, {"FLEXKV_STRICT": "1"}, **flags)
    with pytest.raises(RuntimeError, match=r"the engine ended with [^0]"):
        strict.await_start()
    assert re.search("RuntimeError: .*geometry.*block_size=64", strict.log.read_text())
    strict.close()


@latest_alone
def test_an_engine_killed_while_it_stores_leaves_nothing_behind(
    node: Node, client: RadixClient, prompts: Prompts, make_engine: MakeEngine
) -> None:
    """The others go on, the staged slots come back, and the engine hits its old prompts when it is back."""
    asked = prompts(31, 800, 900)
    expected = node.expected(*asked)
    killed = node.engines[OURS]
    store(client, killed, asked[0])
    (worker,) = killed.processes(TRANSFER_WORKER)
    os.kill(worker, signal.SIGSTOP)  # the store will stay half done
    killed.ask("generate", prompts=[asked[1]])
    wait_until(lambda: pool(client)["num_staged"] > 0, "slots are staged")
    killed.kill()
    other = node.engines[HOOK_LAYERWISE]
    outputs = other.generate(asked[0])
    assert (tokens_of(outputs), cached_of(outputs)) == (expected[:1], [whole_pages(asked[0])])
    wait_until(lambda: pool(client)["num_staged"] == 0, "the staged slots are back")
    node.engines[OURS] = restarted = start(make_engine, node.version, node.server, OURS)
    outputs = restarted.generate(*asked)
    assert tokens_of(outputs) == expected
    assert cached_of(outputs) == [whole_pages(asked[0]), 0]


@pytest.mark.slow
@pytest.mark.engines(SGLANG_23)
def test_tensor_parallel_ranks_agree(
    make_server: MakeServer, make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Two ranks, each with its share of every block; only the first asks the cache."""
    server = make_server("16M")
    environment, flags = WAYS[OURS_LAYERWISE]
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each rank
    engine = make_engine(SGLANG_23, server, environment | cores, **flags, tp_size=2)
    asked = prompts(33, 300, 600)
    expected = tokens_of(engine.generate(*asked))
    overwrite_device(engine, prompts)
    outputs = engine.generate(*asked)
    assert tokens_of(outputs) == expected
    assert cached_of(outputs) == list(map(whole_pages, asked))
    overwrite_device(engine, prompts)
    with RadixClient(server.name) as client:
        client.wait_ready(30)
        client.store.array(ComponentType.FULL)[:] = 0
    assert tokens_of(engine.generate(*asked)) != expected
    engine.close()
