"""Processes that are stopped, as a debugger or a frozen container stops them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon import eventually


@contextmanager
def stopped(pid: int) -> Iterator[Callable[[], None]]:
    """Within, the process pid does not run, or until what this yields is called."""

    def go_on() -> None:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    try:
        yield go_on
    finally:
        go_on()
