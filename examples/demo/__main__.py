"""Run the demo: a radix-server, two engines that share its cache, and checks of all they say.

Exit code 0 when every check held, 1 otherwise.  Whatever happens, no process and no shared memory stays.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from examples.demo.metrics import expected_counters, scrape
from examples.demo.processes import DemoError, EngineProcess, Server, stop_on_signals, sweep
from examples.demo.report import counter_table, new_console, outcome_table, summary
from examples.demo.scenario import SEED, run_step, steps

DATA_BYTES = "256M"


def run(console: Console, name: str, resources: ExitStack) -> list[str]:
    """Run all steps on a new server ``name``; returns what went wrong."""
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    server = Server(name, DATA_BYTES, folder / "radix-server.log")
    resources.callback(server.stop)
    console.print(f"$ {' '.join(server.command)}", soft_wrap=True)
    server.wait_listening()
    engines = {}
    for letter in "AB":
        engines[letter] = EngineProcess(name, f"engine-{letter}")
        resources.callback(engines[letter].stop)
    for engine in engines.values():
        engine.wait_ready()
    pids = ", ".join(f"{engine.label} is process {engine.process.pid}" for engine in engines.values())
    console.print(f"radix-server is process {server.process.pid}, {pids}; texts from seed {SEED}\n")

    outcomes = []
    for step in steps():
        console.print(f"  {step.title} ...")
        outcomes.append(run_step(step, engines))
    console.print(outcome_table(outcomes))
    console.print(summary(outcomes) + "\n")
    expected, scraped = expected_counters(outcomes), scrape(server.metrics_url)
    console.print(counter_table(expected, scraped))
    for command in ("status", "clients"):
        console.print(
            f"$ radixctl --name {name} {command}\n{server.ctl(command, console.width)}", markup=False
        )

    problems = [problem for outcome in outcomes for problem in outcome.problems()]
    return problems + [
        f"{counter} is {scraped.get(counter)}, the engines saw {value}"
        for counter, value in expected.items()
        if scraped.get(counter) != value
    ]


def main() -> int:
    """Run, clean up, tell the result."""
    console = new_console()
    name = f"/demo-{os.getpid()}"
    problems = []
    with stop_on_signals():
        try:
            with ExitStack() as resources:
                problems += run(console, name, resources)
        except DemoError as error:
            problems.append(str(error))
        finally:
            problems += [f"{path} was left behind, and removed now" for path in sweep(name)]
    for problem in problems:
        console.print(f"FAILED: {problem}", style="bold red", markup=False, soft_wrap=True)
    if not problems:
        console.print("All checks held: same output with and without the cache; nothing left in /dev/shm.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
