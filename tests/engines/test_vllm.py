"""Two unmodified vLLM engines share the node's cache: outputs equal those without any cache, token for token.

One engine runs in one process with our connector, the other in several with vLLM's own FlexKVConnectorV1 and
chunked prefill.  The pool is small, so that everything below happens under eviction.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from real_engines import (
    VLLM,
    EngineProcess,
    MakeEngine,
    MakeServer,
    Prompts,
    RadixServer,
    wait_until,
)

from radixshmem import ComponentType, RadixClient

pytestmark = pytest.mark.engines(VLLM)

OURS = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}
FLEXKV = {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}
BLOCK = 32
ROUNDING = 0.01  # of a log-probability; it moves by less than a thousandth
TRANSFER_WORKER = "flexkv_radix.transfer.worker"


@dataclass
class Pair:
    """A node with a radix-server and two engines, and an engine without cache to compare with."""

    server: RadixServer
    reference: EngineProcess
    first: EngineProcess
    second: EngineProcess

    def expected(self, *prompts: list[int], **arguments: Any) -> list[list[int]]:
        return [output["tokens"] for output in self.reference.generate(*prompts, **arguments)]


@pytest.fixture(scope="module")
def pair(make_server: MakeServer, make_engine: MakeEngine) -> Pair:
    server = make_server("16M")
    reference = make_engine(VLLM, None)
    first = make_engine(VLLM, server, kv_transfer_config=OURS)
    second = make_engine(
        VLLM,
        server,
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "1"},
        kv_transfer_config=FLEXKV,
        max_num_batched_tokens=256,
    )
    for engine in (reference, first, second):
        engine.await_start()
    return Pair(server, reference, first, second)


@pytest.fixture
def client(pair: Pair) -> Iterator[RadixClient]:
    with RadixClient(pair.server.name) as client:
        client.wait_ready(10)
        yield client


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def whole_blocks(prompt: list[int]) -> int:
    """Tokens of the prompt that can be had from the cache: at least one is computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def pool(client: RadixClient) -> dict[str, int]:
    counts: dict[str, int] = client.stats()["pool"]["full"]
    return counts


def num_inserted(client: RadixClient) -> int:
    return int(client.stats()["inserted_blocks"]["full"])


def num_evicted(client: RadixClient) -> int:
    return sum(client.stats()["evicted_blocks"]["full"].values())


def store(
    pair: Pair, client: RadixClient, engine: EngineProcess, *prompts: list[int], **arguments: Any
) -> None:
    """Let engine compute the prompts, and wait until all they and their outputs fill is in the cache."""
    before = num_inserted(client)
    outputs = engine.generate(*prompts, **arguments)
    num_blocks = sum((len(p) + len(o["tokens"]) - 1) // BLOCK for p, o in zip(prompts, outputs, strict=True))
    wait_until(lambda: num_inserted(client) >= before + num_blocks, f"{num_blocks} blocks are stored")


def test_prompts_of_one_engine_are_hits_in_the_other(
    pair: Pair, client: RadixClient, prompts: Prompts
) -> None:
    asked = prompts(1, 100, 500, 1000)
    expected = pair.expected(*asked)
    store(pair, client, pair.first, *asked)
    before = pair.second.call("metrics")["vllm:external_prefix_cache_hits"]
    outputs = pair.second.generate(*asked)
    assert tokens_of(outputs) == expected
    assert [output["num_cached"] for output in outputs] == [whole_blocks(prompt) for prompt in asked]
    hits = pair.second.call("metrics")["vllm:external_prefix_cache_hits"] - before
    assert hits == sum(map(whole_blocks, asked))


def test_the_other_way_round_and_longer(pair: Pair, client: RadixClient, prompts: Prompts) -> None:
    """A conversation that moves: prompt and answer of one engine are the prefix of the other's next turn."""
    (start,) = prompts(2, 700)
    store(pair, client, pair.second, start, num_tokens=64)
    turn = start + pair.expected(start, num_tokens=64)[0] + prompts(3, 40)[0]
    (output,) = pair.first.generate(turn)
    assert output["tokens"] == pair.expected(turn)[0]
    assert output["num_cached"] == (700 + 63) // BLOCK * BLOCK


def test_an_engine_with_other_rotary_embeddings_does_not_share(
    pair: Pair, client: RadixClient, prompts: Prompts, make_engine: MakeEngine
) -> None:
    """Equal weights and sizes, but other KV: it is refused, and serves without."""
    asked = prompts(24, 300)
    store(pair, client, pair.first, *asked)
    other = make_engine(
        VLLM,
        pair.server,
        kv_transfer_config=OURS,
        hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    )
    (output,) = other.generate(*asked)
    assert [output["tokens"]] != pair.expected(*asked)
    assert output["num_cached"] == 0
    (warning,) = [line for line in other.log.read_text().splitlines() if "without the KV cache" in line]
    assert "fingerprint" in warning
    other.close()
    assert whole_blocks(asked[0]) == pair.second.generate(*asked)[0]["num_cached"]


def test_a_salt_keeps_tenants_apart(pair: Pair, client: RadixClient, prompts: Prompts) -> None:
    (prompt,) = prompts(4, 300)
    store(pair, client, pair.first, prompt, salt="one tenant")
    cached = {
        salt: pair.second.generate(prompt, salt=salt, num_tokens=1)[0]["num_cached"]
        for salt in (None, "another", "one tenant")
    }
    assert cached == {None: 0, "another": 0, "one tenant": whole_blocks(prompt)}


def test_a_reset_engine_finds_only_what_it_stores_from_then_on(
    pair: Pair, client: RadixClient, prompts: Prompts
) -> None:
    (prompt,) = prompts(5, 300)
    store(pair, client, pair.second, prompt)
    assert pair.first.generate(prompt)[0]["num_cached"] == whole_blocks(prompt)
    assert pair.first.call("reset_cache")
    assert pair.first.generate(prompt)[0]["num_cached"] == 0
    assert pair.second.generate(prompt)[0]["num_cached"] == whole_blocks(prompt)


@pytest.mark.parametrize("name", ["first", "second"])
def test_outputs_depend_on_what_is_loaded(
    pair: Pair, client: RadixClient, prompts: Prompts, name: str
) -> None:
    """The control of all tests here: with the slots zeroed, a hit changes the output."""
    engine: EngineProcess = getattr(pair, name)
    (prompt,) = prompts(6, 600)
    store(pair, client, engine, prompt)
    client.store.array(ComponentType.FULL)[:] = 0
    (output,) = engine.generate(prompt)
    client.reset()
    assert output["num_cached"] == whole_blocks(prompt)
    assert output["tokens"] != pair.expected(prompt)[0]


@pytest.mark.slow
@pytest.mark.parametrize("transfer", [OURS, FLEXKV], ids=lambda transfer: transfer["kv_connector"])
def test_a_strict_engine_does_not_start_without_the_cache(
    pair: Pair, client: RadixClient, make_engine: MakeEngine, transfer: dict[str, str]
) -> None:
    strict = make_engine(
        VLLM, pair.server, {"FLEXKV_STRICT": "1"}, kv_transfer_config=transfer, block_size=64
    )
    with pytest.raises(RuntimeError, match=r"the engine ended with [^0]"):
        strict.await_start()
    assert re.search("RuntimeError: FLEXKV_STRICT=1: .*geometry.*block_size=64", strict.log.read_text())
    strict.close()


def test_requests_survive_the_death_of_the_server(pair: Pair, client: RadixClient, prompts: Prompts) -> None:
    """Both engines are busy when it is killed; hits go on without it, and when it is back."""
    asked = prompts(7, *[400] * 6)
    expected = pair.expected(*asked)
    client.reset()
    store(pair, client, pair.second, *asked[:3])
    before = num_inserted(client)
    engines = (pair.first, pair.second)
    for engine in engines:
        engine.ask("generate", prompts=asked)
    pair.server.kill()
    for engine in engines:
        assert tokens_of(engine.answer()) == expected
    wait_until(lambda: num_inserted(client) >= before + 3 * ((400 + 15) // BLOCK), "the rest is stored")
    for restarts in (False, True):
        if restarts:
            pair.server.start()
        for engine in engines:
            outputs = engine.generate(*asked)
            assert tokens_of(outputs) == expected
            assert all(output["num_cached"] == whole_blocks(asked[0]) for output in outputs)


def test_soak_under_eviction(pair: Pair, client: RadixClient, prompts: Prompts) -> None:
    """300 requests over both engines; shared prefixes, and three times as many blocks as the pool holds."""
    generator = random.Random(8)
    systems = prompts(9, 200, 333, 480)
    tails = prompts(10, *[generator.randrange(20, 400) for _ in range(40)])
    asked = [generator.choice(systems) + tail for tail in tails]
    expected = dict(enumerate(pair.expected(*asked, num_tokens=4)))
    evicted = num_evicted(client)
    num_cached = 0
    for _ in range(15):
        batches = [generator.choices(range(len(asked)), k=10) for _ in range(2)]
        for engine, batch in zip((pair.first, pair.second), batches, strict=True):
            engine.ask("generate", prompts=[asked[i] for i in batch], num_tokens=4)
        for engine, batch in zip((pair.first, pair.second), batches, strict=True):
            for i, output in zip(batch, engine.answer(), strict=True):
                assert output["tokens"] == expected[i], f"prompt {i}"
                num_cached += output["num_cached"]
    assert num_cached > 0
    assert num_evicted(client) > evicted + 500


def test_a_dead_transfer_worker_costs_hits_alone(pair: Pair, client: RadixClient, prompts: Prompts) -> None:
    """Killed with a load under way: the blocks are computed instead.  Another worker brings it back."""
    prompt, other = prompts(11, 900, 500)
    store(pair, client, pair.second, prompt)
    (worker,) = pair.second.processes(TRANSFER_WORKER)
    os.kill(worker, signal.SIGSTOP)
    pair.second.ask("generate", prompts=[prompt])
    wait_until(lambda: pool(client)["num_pins"] > 0, "the load has begun")
    os.kill(worker, signal.SIGKILL)
    assert tokens_of(pair.second.answer()) == pair.expected(prompt)
    wait_until(lambda: "the KV cache is back" in pair.second.log.read_text(), "the worker is replaced")
    store(pair, client, pair.second, other)
    assert tokens_of(pair.second.generate(prompt, other)) == pair.expected(prompt, other)


def test_requests_that_are_preempted(
    pair: Pair, client: RadixClient, prompts: Prompts, make_engine: MakeEngine
) -> None:
    """Four at a time in memory for three: preempted, resumed, and loaded the second time.

    Batches round otherwise than single requests, so it is not the tokens that are compared: each has to be
    the likeliest by the judgement of the engine without cache, or as good as that.
    """
    asked, num_tokens = prompts(13, *[300] * 4), 100
    memory = {"kv_cache_memory_bytes": 40 * 65536, "max_model_len": 512, "max_num_seqs": 4}
    pressed = make_engine(VLLM, pair.server, kv_transfer_config=OURS, **memory)
    client.reset()
    for _ in range(2):
        answers = tokens_of(pressed.generate(*asked, num_tokens=num_tokens))
        whole = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
        for output in pair.reference.generate(*whole, num_tokens=1, judges_prompt=True):
            assert max(output["regrets"][-num_tokens:]) < ROUNDING
            assert max(output["regrets"][:-num_tokens]) > 1  # of random tokens
    metrics = pressed.call("metrics")
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:external_prefix_cache_hits"] >= 4 * whole_blocks(asked[0])
    assert metrics["vllm:radixshmem_errors"] == 0
    pressed.close()


def test_an_engine_killed_while_it_stores_leaves_nothing_behind(
    pair: Pair, client: RadixClient, prompts: Prompts, make_engine: MakeEngine
) -> None:
    """The other engine goes on, the slots come back, and the restarted engine hits its old prompts.

    It restarts with our connector as one of a MultiConnector, loading synchronously.
    """
    asked = prompts(12, 800, 900)
    expected = pair.expected(*asked)
    client.reset()
    kept = make_engine(VLLM, pair.server, kv_transfer_config=OURS)
    store(pair, client, kept, asked[0])
    (worker,) = kept.processes(TRANSFER_WORKER)
    os.kill(worker, signal.SIGSTOP)  # the store will stay half done
    kept.ask("generate", prompts=[asked[1]])
    wait_until(lambda: pool(client)["num_staged"] > 0, "slots are staged")
    kept.kill()
    (output,) = pair.second.generate(asked[0])
    assert (output["tokens"], output["num_cached"]) == (expected[0], whole_blocks(asked[0]))
    wait_until(lambda: pool(client)["num_staged"] == 0, "the staged slots are back")
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [OURS | {"kv_connector_extra_config": {"load_async": False}}]
        },
    }
    restarted = make_engine(VLLM, pair.server, kv_transfer_config=multi)
    outputs = restarted.generate(*asked)
    assert tokens_of(outputs) == expected
    assert [output["num_cached"] for output in outputs] == [whole_blocks(asked[0]), 0]
