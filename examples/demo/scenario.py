"""What the demo has the two engines do, and what has to come out of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from examples.demo.engine import Answer, Request
from examples.demo.processes import EngineProcess
from examples.demo.transformer import Shape

SEED = 7
DOCUMENT_CHARS = 1200
QUESTION_CHARS = 160
WORDS = ("the", "cache", "block", "prompt", "token", "engine", "shall", "must", "of", "in", "to", "and")
NUM_OUTPUT_TOKENS = 12
SAME_LOGITS = 1e-4  # a BLAS may add in another order; wiped KV moves logits by 1 and more


@dataclass(frozen=True)
class Step:
    """A request to one engine.  ``hit_with`` is an earlier prompt whose blocks the cache has to know."""

    title: str
    engine: str
    prompt: str
    hit_with: str = ""
    zero_kv: bool = False


@dataclass(frozen=True)
class Outcome:
    """A step's answer, and the same engine's answer to the same prompt without the cache.

    A prompt that hit nothing was computed without the cache: it is its own reference.
    """

    step: Step
    answer: Answer
    reference: Answer

    @property
    def same_output(self) -> bool:
        return self.answer.output == self.reference.output and self.logits_apart <= SAME_LOGITS

    @property
    def logits_apart(self) -> float:
        """Largest difference between any two logits after the prompt."""
        return float(np.abs(np.subtract(self.answer.logits, self.reference.logits)).max())

    def problems(self) -> list[str]:
        """What is wrong, if anything."""
        found = []
        expected = expected_hit(self.step)
        if self.answer.num_hit_blocks != expected:
            found.append(f"{self.answer.num_hit_blocks} blocks hit instead of {expected}")
        if self.answer.num_foreign_blocks != expected:
            found.append(f"only {self.answer.num_foreign_blocks} of {expected} blocks are the other engine's")
        if self.same_output == self.step.zero_kv:
            is_same = "equals" if self.same_output else "differs from"
            found.append(f"the output {is_same} the one without the cache")
        return [f"{self.step.title}: {problem}" for problem in found]


def steps() -> list[Step]:
    """The script of the demo."""
    contract, manual = _text("contract", DOCUMENT_CHARS), _text("manual", DOCUMENT_CHARS)
    ask_dates = contract + _text("question on dates", QUESTION_CHARS)
    ask_price = contract + _text("question on prices", QUESTION_CHARS)
    ask_repair = manual + _text("question on repair", QUESTION_CHARS)
    return [
        Step("A stores a prompt", "A", ask_dates),
        Step("B gets the same", "B", ask_dates, hit_with=ask_dates),
        Step("B: new question", "B", ask_price, hit_with=ask_dates),
        Step("B stores another", "B", ask_repair),
        Step("A gets the same", "A", ask_repair, hit_with=ask_repair),
        Step("B: KV wiped", "B", ask_dates, hit_with=ask_dates, zero_kv=True),
    ]


def expected_hit(step: Step) -> int:
    """Whole blocks that the prompt shares with ``hit_with``; its last token is always computed."""
    same = 0
    for ours, theirs in zip(step.prompt[:-1], step.hit_with[:-1], strict=False):
        if ours != theirs:
            break
        same += 1
    return same // Shape().chunk_tokens


def run_step(step: Step, engines: Mapping[str, EngineProcess]) -> Outcome:
    """Run the step with the cache and, if it hit, once more without it."""
    request = Request(step.prompt, NUM_OUTPUT_TOKENS, zero_kv=step.zero_kv)
    engine = engines[step.engine]
    answer = engine.serve(request)
    if not answer.num_hit_blocks:
        return Outcome(step, answer, answer)
    return Outcome(step, answer, engine.serve(replace(request, use_cache=False, zero_kv=False)))


def _text(title: str, num_chars: int) -> str:
    """Seeded filler text."""
    rng = random.Random(f"{SEED} {title}")
    text = f"The {title}. " + " ".join(rng.choices(WORDS, k=num_chars // 2))
    return text[: num_chars - 1] + "\n"
