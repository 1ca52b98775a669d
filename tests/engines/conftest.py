"""Fixtures of the end-to-end tests.  Engines take long to start, so tests of a module share them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from real_engines import (
    DYNAMO,
    SCRIPTS,
    SGLANG_20,
    SGLANG_23,
    VLLM,
    EngineProcess,
    MakeEngine,
    MakeServer,
    Prompts,
    RadixServer,
    closing_all,
    is_chosen,
    python_of,
)

MODEL_MAKERS = (VLLM, SGLANG_23, SGLANG_20)  # their environments have what tiny_llama.py needs
ALL_ENGINES = (*MODEL_MAKERS, DYNAMO)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and deselect those that need an engine which ENGINES leaves out."""
    left_out = []
    for item in items:
        if SCRIPTS in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(1800))  # starting an engine on a busy machine
            if not all(map(is_chosen, engines_of(item))):
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def engines_of(item: pytest.Item) -> set[str]:
    """Engines that a test needs: named by its or its module's `engines` marker, or its parameters."""
    named = {str(engine) for marker in item.iter_markers("engines") for engine in marker.args}
    parameters = (
        item.callspec.params.values()
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ()
    )
    return named | ({*ALL_ENGINES} & {value for value in parameters if isinstance(value, str)})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with real weights."""
    directory = tmp_path_factory.mktemp("tiny_llama")
    python = next(python_of(engine) for engine in MODEL_MAKERS if is_chosen(engine))
    subprocess.run([python, SCRIPTS / "tiny_llama.py", directory], check=True)
    return str(directory)


@pytest.fixture(scope="module")
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """radix-servers that end with the module."""
    logs = tmp_path_factory.mktemp("servers")
    with closing_all() as servers:

        def make(data_bytes: str = "256M", *flags: str) -> RadixServer:
            servers.append(RadixServer(logs / f"{len(servers)}.log", data_bytes, *flags))
            return servers[-1]

        yield make


@pytest.fixture(scope="module")
def make_engine(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    """Engines that end with the module: make_engine(kind, server | None, environment=..., **options)."""
    logs = tmp_path_factory.mktemp("engines")
    with closing_all() as engines:

        def make(
            kind: str, server: RadixServer | None, environment: dict[str, str] | None = None, **options: Any
        ) -> EngineProcess:
            names = {"FLEXKV_RADIXSHMEM_SERVER_NAME": server.name} if server else {}
            log = logs / f"{len(engines)}.log"
            options = {"model": model} | options
            engines.append(EngineProcess(kind, options, log, {**names, **(environment or {})}))
            return engines[-1]

        yield make


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """prompts(seed, *lengths): token ids, equal for equal seeds."""

    def make(seed: int, *lengths: int) -> list[list[int]]:
        print(f"prompts: seed {seed}")
        generator = np.random.default_rng(seed)
        return [generator.integers(2, 512, length).tolist() for length in lengths]

    return make
