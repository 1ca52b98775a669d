"""Byte sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

MAX_BYTES = 2**63 - 1
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"(?P<number>[0-9]+|[0-9]+\.[0-9]+(?=[A-Z]))(?P<prefix>[KMGTP]?)(?P<suffix>I?B?)")


def parse_size(text: str | int, flag: str = "size") -> int:
    """Bytes meant by ``text``: ``64G`` = ``64Gi`` = ``64GiB`` = 64 * 2**30, ``64GB`` = 64 * 10**9.

    Plain integers are bytes; a fraction needs a unit and is rounded down to whole bytes.  Case does
    not matter.  Raises ValueError naming ``flag`` for anything else and for more than 2**63 - 1 bytes.
    """
    match = _SIZE.fullmatch(str(text).strip().upper())
    if match is None or (not match["prefix"] and match["suffix"]):
        raise ValueError(
            f"{flag}: {str(text)!r} is not a size; write bytes or use a unit, such as 1073741824, 64G or 1.5T"
        )
    unit = 1000 if match["suffix"] == "B" else 1024
    num_bytes = int(Decimal(match["number"]) * unit ** _POWER[match["prefix"]])
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{flag}: {text} is more than {MAX_BYTES} bytes")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """``num_bytes`` in the largest binary unit that keeps it at 1 or more: ``1.5 GiB``, ``512 B``."""
    for prefix in reversed("KMGTP"):
        unit = 1024 ** _POWER[prefix]
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.4g} {prefix}iB"
    return f"{num_bytes} B"
