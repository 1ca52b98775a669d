"""The table of results."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.row import Row

WIDTH = 170  # where there is no terminal to ask
MET = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}


def result_table(console: Console, rows: Sequence[Row]) -> None:
    """Print all rows, and the machine they are from."""
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False, file=console.file)
    machine = describe_machine()
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    table.caption = (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']:.1f}, "
        f"Linux {machine['kernel']}, Python {machine['python']}"
    )
    for title in ("what", "measured", "target", "limit / baseline", "met?"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(row.what, row.measured, row.target, row.limit, MET[row.met])
    console.print(table)
