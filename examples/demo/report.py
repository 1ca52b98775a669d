"""What the demo prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.scenario import Outcome

MIN_WIDTH = 124  # of the widest table; a pipe or a log has no width of its own


def new_console() -> Console:
    """A console that is wide enough for the tables where there is no terminal to ask."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=MIN_WIDTH, highlight=False)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One line a step."""
    table = Table(title="Two engines, one cache", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("step", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("blocks hit", justify="right")
    table.add_column("read from\nthe other", justify="right")
    table.add_column("prefill without\nthe cache", justify="right")
    table.add_column("with it", justify="right")
    table.add_column("speed-up", justify="right")
    table.add_column("output", no_wrap=True)
    table.add_column("logits\napart", justify="right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    return table


def summary(outcomes: Sequence[Outcome]) -> str:
    """The demo in one line."""
    hits = [outcome for outcome in outcomes if outcome.answer.num_hit_blocks and not outcome.step.zero_kv]
    read_bytes = sum(o.answer.num_foreign_blocks * o.answer.block_bytes for o in hits)
    without_s = sum(o.reference.prefill_s for o in hits)
    with_s = sum(o.answer.prefill_s for o in hits)
    return (
        f"{len(hits)} prompts read {read_bytes / 2**20:.1f} MiB of the other engine's KV: "
        f"{with_s * 1e3:.0f} ms of prefill instead of {without_s * 1e3:.0f} ms, "
        f"{without_s / with_s:.1f}x faster"
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


def _cells(outcome: Outcome) -> list[str]:
    answer, reference = outcome.answer, outcome.reference
    read_bytes = answer.num_foreign_blocks * answer.block_bytes
    is_hit = answer.num_hit_blocks > 0
    return [
        outcome.step.title,
        str(answer.num_tokens),
        f"{answer.num_hit_blocks} of {answer.num_asked_blocks}",
        f"{read_bytes / 2**20:.2f} MiB" if read_bytes else "-",
        f"{reference.prefill_s * 1e3:.0f} ms",
        f"{answer.prefill_s * 1e3:.0f} ms" if is_hit else "-",
        f"{reference.prefill_s / answer.prefill_s:.1f}x" if is_hit and not outcome.step.zero_kv else "-",
        ("equal" if outcome.same_output else "different") if is_hit else "-",
        f"{outcome.logits_apart:.2g}" if is_hit else "-",
    ]
