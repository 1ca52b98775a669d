"""How often something that died is started again.  Pure: the clock is the caller's.

One death is an accident and costs a moment; one that comes again and again has a cause that starting
anew does not cure, and each turn of it costs the engine its transfers under way.
"""

from __future__ import annotations

from collections import deque

MAX_DEATHS = 5
WINDOW_S = 300.0
_FIRST_PAUSE_S = 1.0  # doubled with each further death; the very first one costs no pause


class Restarts:
    """Counts the deaths of one thing."""

    def __init__(self, max_deaths: int = MAX_DEATHS, window_s: float = WINDOW_S) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def died(self, now_s: float) -> float | None:
        """Seconds to pause before the next start; None for the max_deaths-th death within window_s."""
        self._deaths.append(now_s)
        while self._deaths[0] <= now_s - self._window_s:
            self._deaths.popleft()
        num_deaths = len(self._deaths)
        if num_deaths >= self._max_deaths:
            return None
        return _FIRST_PAUSE_S * 2.0 ** (num_deaths - 2) if num_deaths > 1 else 0.0

    def __str__(self) -> str:
        return f"{len(self._deaths)} deaths within {self._window_s:g} s"
