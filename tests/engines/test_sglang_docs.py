"""SGLang's part of docs/engines.md and its example, run as written by a user in SGLang's environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_shell import DOCS, QUESTION_TOKENS, Shell, command_lines, first_words, open_shell
from real_engines import SGLANG_23, VLLM, free_port

pytestmark = [pytest.mark.engines(SGLANG_23, VLLM), pytest.mark.slow]

ON_A_CPU = (
    "--attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --max-total-tokens 8192"
)
FLAGS = f"--enable-cache-report --sleep-on-idle {ON_A_CPU}"  # reports what ask.py prints
PAGE = 32
HITS = (QUESTION_TOKENS - 1) // PAGE * PAGE


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with open_shell(tmp_path, SGLANG_23) as shell:
        shell.environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        yield shell


def test_the_page_says_what_a_cpu_needs() -> None:
    assert ON_A_CPU in DOCS


def test_both_backends_share_a_node(shell: Shell) -> None:
    """One engine for each line."""
    shell.start(*command_lines("radix-server --name"))
    lines = command_lines("python -m sglang.launch_server")
    first = free_port()
    ports = [first + 10 * number for number in range(len(lines))]
    for line, port in zip(lines, ports, strict=True):
        shell.start(f"{line} --port {port} {FLAGS}")
    urls = " ".join(f"http://127.0.0.1:{port}" for port in ports)
    assert first_words(shell.run(f"python examples/vllm_two_engines/ask.py {urls}")) == [0, HITS]


def test_the_example_of_two_engines(shell: Shell) -> None:
    (line,) = command_lines("examples/sglang/run.sh")
    output = shell.run(f"{line} {FLAGS}", PORT=free_port(), DATA_BYTES="256M")
    assert first_words(output) == [0, HITS]
