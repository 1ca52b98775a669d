"""One line of the table that ``python -m benchmarks.run`` prints, and how a script hands it over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

SKIPPED = 77  # exit code of a script that cannot run here; its last line on stderr says why


@dataclass(frozen=True)
class Row:
    """``measured``, ``target`` and ``limit`` are texts with units; ``value`` is ``measured`` as a number.

    ``limit``: what the machine would allow, or the baseline, measured in the same run where it can be.
    ``met``: whether the target is reached; None where there is none.
    """

    what: str
    measured: str
    target: str = ""
    limit: str = ""
    met: bool | None = None
    value: float | None = None


def emit(row: Row) -> None:
    """Hand ``row`` to the runner, as a line of JSON on stdout."""
    print(json.dumps(asdict(row)), flush=True)


def parse(line: str) -> Row | None:
    """The row on a line of a script's output, or None for any other text."""
    if not line.startswith("{"):
        return None
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError):
        return None


def at_most(what: str, value: float, target: float, unit: str, limit: str = "", digits: int = 2) -> Row:
    """A row whose ``value`` must not exceed ``target``."""
    text = f"{value:.{digits}f} {unit}"
    return Row(what, text, f"<= {target:g} {unit}", limit, value <= target, value)


def at_least(what: str, value: float, target: float, unit: str, limit: str = "", digits: int = 2) -> Row:
    """A row whose ``value`` must reach ``target``."""
    text = f"{value:.{digits}f} {unit}"
    return Row(what, text, f">= {target:g} {unit}", limit, value >= target, value)
