"""vLLM's part of docs/engines.md and the examples, run as written by a user in vLLM's environment.

But the engines are told not to compile the model, which takes longer than all the rest.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_shell import QUESTION_TOKENS, Shell, command_lines, first_words, open_shell
from real_engines import DYNAMO, VLLM, free_port, python_of

pytestmark = [pytest.mark.engines(VLLM), pytest.mark.slow]

DEFAULT_BLOCK = 128  # of vLLM on a CPU
EAGER = "--enforce-eager"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with open_shell(tmp_path, VLLM) as shell:
        yield shell


def external_hits(port: int) -> float:
    """Tokens that an engine had from the node's cache, by its own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    (count,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
    return float(count)


def whole_blocks(num_tokens: int) -> int:
    return (num_tokens - 1) // DEFAULT_BLOCK * DEFAULT_BLOCK


def test_both_connectors_share_a_node(shell: Shell) -> None:
    """One engine for each line, and the page's radixctl lines."""
    (server,) = command_lines("radix-server --name")
    shell.start(server)
    ports = [free_port() for _ in range(2)]
    serve = [line for line in command_lines("vllm serve") if "events" not in line]
    for line, port in zip(serve, ports, strict=True):
        shell.start(f"{line} --port {port} {EAGER}")
    urls = " ".join(f"http://127.0.0.1:{port}" for port in ports)
    ask = f"python examples/vllm_two_engines/ask.py {urls}"
    assert "answers are equal" in shell.run(ask)
    assert [external_hits(port) for port in ports] == [0, whole_blocks(QUESTION_TOKENS)]
    for line in command_lines("radixctl --name"):
        shell.run(line)


@pytest.mark.engines(DYNAMO)
def test_an_indexer_hears_of_the_prompt(shell: Shell) -> None:
    shell.start(*command_lines("radix-server --name"))
    shell.start(*command_lines("python -m dynamo.indexer"))
    port = free_port()
    (serve,) = [line for line in command_lines("vllm serve") if "events" in line]
    shell.start(f"{serve} --port {port} {EAGER}")
    shell.run(*command_lines("curl"))
    url = f"http://127.0.0.1:{port} http://127.0.0.1:{shell.indexer_port}"
    assert f"{{'1': {whole_blocks(QUESTION_TOKENS)}}}" in shell.run(f"python examples/dynamo/route.py {url}")


def test_the_example_of_two_engines(shell: Shell) -> None:
    (line,) = command_lines("examples/vllm_two_engines/run.sh")
    output = shell.run(f"{line} {EAGER}", PORT=free_port(), DATA_BYTES="256M")
    assert first_words(output) == [0, whole_blocks(QUESTION_TOKENS)]


@pytest.mark.engines(DYNAMO)
def test_the_example_of_a_router(shell: Shell) -> None:
    (line,) = command_lines("examples/dynamo/run.sh")
    ports = {name: free_port() for name in ("PORT", "EVENTS_PORT", "INDEXER_PORT")}
    output = shell.run(f"{line} {EAGER}", DATA_BYTES="256M", INDEXER_PYTHON=python_of(DYNAMO), **ports)
    assert "after:" in output
