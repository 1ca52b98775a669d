"""Hit rate of conversations over two vLLM engines in turn: one shared cache, or two private halves.

    python -m benchmarks.engines_hit_rate [--conversations 25] [--turns 5]

Each turn's prompt is the conversation so far and a new question.  The shared cache holds all conversations;
a private one has half that size.  Needs the environment of tests/engines/setup_vllm.sh with this package.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from rich.console import Console

from benchmarks.engines_setup import BLOCK, Bench, bench
from benchmarks.report import result_table
from benchmarks.row import Row

QUESTION_TOKENS, ANSWER_TOKENS = 96, 32
SLOT_BYTES = 65536  # of the tiny Llama


def hit_rate(here: Bench, num_conversations: int, num_turns: int, *, shared: bool) -> float:
    """Share of all prompt tokens that was loaded instead of computed."""
    num_blocks = num_conversations * num_turns * (QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK
    if shared:
        servers = [here.server(str(num_blocks * SLOT_BYTES))] * 2
    else:
        servers = [here.server(str(num_blocks // 2 * SLOT_BYTES)) for _ in range(2)]
    engines = [here.engine(server) for server in servers]
    generator = np.random.default_rng(2)
    conversations: list[list[int]] = [[] for _ in range(num_conversations)]
    turn = itertools.count()
    num_cached = num_asked = 0
    for _ in range(num_turns):
        for conversation in conversations:
            conversation += generator.integers(2, 512, QUESTION_TOKENS).tolist()
            (output,) = engines[next(turn) % 2].generate(conversation, num_tokens=ANSWER_TOKENS)
            num_cached += output["num_cached"]
            num_asked += len(conversation)
            conversation += output["tokens"]
    for engine in engines:
        engine.close()
    return num_cached / num_asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--conversations", type=int, default=25)  # odd: a conversation changes engines
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    turns = range(options.turns)
    lengths = [turn * (QUESTION_TOKENS + ANSWER_TOKENS) + QUESTION_TOKENS for turn in turns]
    ceiling = sum(turn * (QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK * BLOCK for turn in turns) / sum(lengths)
    with bench() as here:
        rates = {
            name: hit_rate(here, options.conversations, options.turns, shared=shared)
            for name, shared in (("one shared cache", True), ("two private halves", False))
        }
    result_table(
        Console(),
        [
            Row(f"hit rate, {name}", f"{rate:.1%}", limit=f"at most {ceiling:.1%}", value=rate)
            for name, rate in rates.items()
        ],
    )


if __name__ == "__main__":
    main()
