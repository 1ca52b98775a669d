"""Small clocks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np


def p50_us(call: Callable[[], object], rounds: int) -> float:
    """Median time of ``call`` in microseconds."""
    times = np.empty(rounds)
    for i in range(rounds):
        start = time.perf_counter()
        call()
        times[i] = time.perf_counter() - start
    return float(np.median(times)) * 1e6


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return once ``condition`` holds; TimeoutError naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {timeout_s:g} s")
        time.sleep(0.01)
