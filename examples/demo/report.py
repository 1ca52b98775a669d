"""What the demo prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.scenario import Outcome

MIN_WIDTH = 100  # enough for every table; a pipe or a log has no width of its own


def new_console() -> Console:
    """A console that is wide enough for the tables where there is no terminal to ask."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=MIN_WIDTH, highlight=False)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One line a step."""
    title = f"Two engines, one cache; prompts of {outcomes[0].answer.num_tokens} tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("step", no_wrap=True)
    for column in ("blocks\nhit", "MiB from\nthe other", "prefill ms\nwithout", "\nwith", "\nfaster"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("\noutput", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    return table


def summary(outcomes: Sequence[Outcome]) -> str:
    """The demo in two lines."""
    hits = [outcome for outcome in outcomes if outcome.answer.num_hit_blocks and not outcome.step.zero_kv]
    wiped = [outcome for outcome in outcomes if outcome.step.zero_kv]
    read_bytes = sum(o.answer.num_foreign_blocks * o.answer.block_bytes for o in hits)
    without_s = sum(o.reference.prefill_s for o in hits)
    with_s = sum(o.answer.prefill_s for o in hits)
    return (
        f"{len(hits)} prompts read {read_bytes / 2**20:.1f} MiB of the other engine's KV: "
        f"{with_s * 1e3:.0f} ms of prefill instead of {without_s * 1e3:.0f} ms, "
        f"{without_s / with_s:.1f}x faster.\n"
        f"Largest difference of a logit: {_logits_apart(hits):.2g}; "
        f"with the KV wiped: {_logits_apart(wiped):.2g}."
    )


def counter_table(expected: Mapping[str, int], scraped: Mapping[str, float]) -> Table:
    """The server's counters beside what the engines saw."""
    table = Table(title="Metrics endpoint", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("counter", no_wrap=True)
    table.add_column("engines saw", justify="right")
    table.add_column("server counted", justify="right")
    for name, value in expected.items():
        table.add_row(name, str(value), f"{scraped.get(name, float('nan')):.0f}")
    return table


def _logits_apart(outcomes: Sequence[Outcome]) -> float:
    return max(outcome.logits_apart for outcome in outcomes)


def _cells(outcome: Outcome) -> list[str]:
    answer, reference = outcome.answer, outcome.reference
    cells = [
        outcome.step.title,
        f"{answer.num_hit_blocks}/{answer.num_asked_blocks}",
    ]
    if not answer.num_hit_blocks:
        return [*cells, "-", f"{reference.prefill_s * 1e3:.0f}", "-", "-", "-"]
    return [
        *cells,
        f"{answer.num_foreign_blocks * answer.block_bytes / 2**20:.2f}",
        f"{reference.prefill_s * 1e3:.0f}",
        f"{answer.prefill_s * 1e3:.0f}",
        "-" if outcome.step.zero_kv else f"{reference.prefill_s / answer.prefill_s:.1f}x",
        "equal" if outcome.same_output else "differs",
    ]
