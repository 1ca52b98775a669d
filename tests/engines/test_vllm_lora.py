"""Adapters (LoRA) in vLLM: requests share KV exactly when they use the same adapter.

One engine runs in one process, the other in several; both with our connector.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import pytest
from real_engines import (
    SCRIPTS,
    VLLM,
    EngineProcess,
    MakeEngine,
    MakeServer,
    Prompts,
    RadixServer,
    python_of,
    wait_until,
)

from radixshmem import RadixClient

pytestmark = pytest.mark.engines(VLLM)

OURS = {"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}
HITS = "vllm:external_prefix_cache_hits"
BLOCK = 32
Adapter = tuple[str, int, str]  # name, vLLM's number, directory


@pytest.fixture(scope="module")
def directories(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of different contents, and one that is a copy."""
    root = tmp_path_factory.mktemp("adapters")
    made = {}
    for name, seed in (("one", "1"), ("other", "2"), ("copy of one", "1")):
        made[name] = str(root / name)
        subprocess.run(
            [python_of(VLLM), SCRIPTS / "tiny_lora.py", model, made[name], "--seed", seed], check=True
        )
    return made


@dataclass
class Pair:
    server: RadixServer
    first: EngineProcess
    second: EngineProcess


@pytest.fixture(scope="module")
def pair(make_server: MakeServer, make_engine: MakeEngine) -> Pair:
    server = make_server("32M")
    options = {"kv_transfer_config": OURS, "enable_lora": True, "max_lora_rank": 8}
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "1"}
    first, second = make_engine(VLLM, server, **options), make_engine(VLLM, server, several, **options)
    return Pair(server, first.await_start(), second.await_start())


def ask(engine: EngineProcess, prompt: list[int], adapter: Adapter | None) -> tuple[list[int], int]:
    """(tokens of the answer, tokens of the prompt that were hits by vLLM's own count)."""
    before = engine.call("metrics")[HITS]
    (output,) = engine.generate(prompt, lora=adapter)
    return output["tokens"], int(engine.call("metrics")[HITS] - before)


def test_only_the_same_adapter_hits(pair: Pair, directories: dict[str, str], prompts: Prompts) -> None:
    """The same: by name and contents, whatever its number and path."""
    (prompt,) = prompts(41, 400)
    computed = {}
    for adapter in (None, ("one", 1, directories["one"]), ("other", 2, directories["other"])):
        tokens, hits = ask(pair.first, prompt, adapter)
        assert hits == 0, f"{adapter} was given another's KV"
        computed[adapter and adapter[0]] = tokens
    assert len(set(map(tuple, computed.values()))) == 3
    with RadixClient(pair.server.name) as client:
        client.wait_ready(10)
        num_blocks = 3 * ((len(prompt) + 15) // BLOCK)
        wait_until(lambda: client.stats()["inserted_blocks"]["full"] >= num_blocks, "all three are stored")
    for adapter in (("one", 7, directories["copy of one"]), ("other", 1, directories["other"]), None):
        tokens, hits = ask(pair.second, prompt, adapter)
        assert tokens == computed[adapter and adapter[0]]
        assert hits == len(prompt) // BLOCK * BLOCK
    tokens, hits = ask(pair.second, prompt, ("one", 3, directories["other"]))  # another one by the same name
    assert hits == 0
    assert tokens == computed["other"]
