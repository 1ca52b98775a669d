"""What SIGINT and SIGTERM do to a command: it ends without a traceback, with exit code 128 + the signal.

Imports next to nothing: a command calls ``end_at_once`` before it imports what takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """For while nothing has to be given back, as during imports."""
    _handle(lambda number, frame: os._exit(128 + number))


def unwind() -> None:
    """End through every ``finally``: a client detaches, a terminal gets its cursor back."""
    _handle(lambda number, frame: sys.exit(128 + number))


def _handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
