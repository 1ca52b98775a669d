"""Bytes of the index for each FULL slot, fixed parts apart: the slope between two sizes."""

from __future__ import annotations

from benchmarks.row import at_most, emit
from radixshmem import Geometry, _native
from radixshmem.geometry import plan_geometry
from radixshmem.records import RegionConfig

TARGET_BYTES = 80
# The hash table's size is a power of two, so a slot costs most just above one and least at it.
SIZES = (65_536, 65_537, 100_000, 131_072, 1_000_000, 1_048_576, 1_048_577, 16_000_000)


def index_bytes(num_slots: int) -> int:
    """Size of an index-only region's file."""
    geometry = plan_geometry(Geometry(16, full_slot_bytes=1, full_slots=num_slots))
    return _native.region_bytes(RegionConfig(geometry))


def main() -> None:
    """Emit the most expensive size."""
    fixed = index_bytes(1)
    per_slot = {num: (index_bytes(num) - fixed) / num for num in SIZES}
    worst = max(per_slot, key=lambda num: per_slot[num])
    best = min(per_slot.values())
    limit = f"{best:.1f} bytes at best; fixed parts {fixed / 2**20:.1f} MiB"
    emit(
        at_most(
            f"index memory per FULL slot, worst at {worst} slots",
            per_slot[worst],
            TARGET_BYTES,
            "bytes",
            limit,
            1,
        )
    )


if __name__ == "__main__":
    main()
