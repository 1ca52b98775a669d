"""What a region tells of the life of its blocks, cut down to what one engine announces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RingEvents:
    """What the region says since a cursor: +1 stored by this client, -1 removed by anyone, 0 all cleared."""

    cursor: int
    kinds: npt.NDArray[np.int8]
    hashes: Hashes
    overflow: bool
