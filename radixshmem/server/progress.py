"""Shows how far the making of regions is: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from radixshmem.sizes import format_size

log = logging.getLogger(__name__)

_LINE_INTERVAL_S = 5.0


class ProgressView(Protocol):
    """Something that shows ``advance(done, total)`` while it is entered."""

    def __enter__(self) -> ProgressView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def advance(self, done_bytes: int, total_bytes: int) -> None: ...


def progress_view(what: str, use_bar: bool) -> ProgressView:
    """A bar for a server that has a terminal to itself, else log lines."""
    return _Bar(what) if use_bar and sys.stderr.isatty() else _Lines(what)


class _Bar:
    def __init__(self, what: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(what, total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)


class _Lines:
    """A line at the start of the work is enough for small regions; long work gets one every 5 s."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._last = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last < _LINE_INTERVAL_S and done_bytes < total_bytes:
            return
        self._last = now
        rate = done_bytes / max(now - self._start, 1e-9)
        left_s = (total_bytes - done_bytes) / rate if rate else 0
        log.info(
            "%s: %s of %s (%d %%), %s/s, %.0f s left",
            self._what,
            format_size(done_bytes),
            format_size(total_bytes),
            100 * done_bytes // max(1, total_bytes),
            format_size(round(rate)),
            left_s,
        )
