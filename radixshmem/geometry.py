"""What a slot is (the client's side) and how many there are (the server's side)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Decimal, localcontext
from enum import IntEnum
from typing import Any

from radixshmem.errors import GeometryMismatch

MAX_SLOTS = 0x7FFFFF00  # slot ids travel as int32, and the last few values are special in the index
MAX_WINDOW_BLOCKS = 1024
MAX_FINGERPRINT_BYTES = 127
DEFAULT_SLOT_ALIGN = 4096
DEFAULT_REGISTER_CHUNK_TOKENS = 4096
MIN_POOL_ALIGN = 64  # a pool starts on a cache line of its own


class ComponentType(IntEnum):
    """What a slot holds: KV of full attention, of sliding-window attention, or a Mamba state."""

    FULL = 0
    SWA = 1
    MAMBA = 2


COMPONENT_MASK_FULL = 1
COMPONENT_MASK_SWA = 2
COMPONENT_MASK_MAMBA = 4

POOL_NAMES = {ComponentType.FULL: "full", ComponentType.SWA: "swa", ComponentType.MAMBA: "mamba"}


@dataclass(frozen=True)
class Geometry:
    """Shapes that a client brings.  Counts are the server's, unless it keeps an index only.

    ``slot_align``: a slot's stride is its bytes rounded up to this power of two; 0 takes the
    server's.  ``register_chunk_tokens``: 0 takes the server's.  ``fingerprint`` says what the bytes
    mean; the server keeps the first non-empty one.  ``*_slots``: only for a server without
    ``--data-bytes``.
    """

    block_size: int
    full_slot_bytes: int
    swa_slot_bytes: int = 0
    swa_window_blocks: int = 0
    mamba_slot_bytes: int = 0
    slot_align: int = 0
    register_chunk_tokens: int = 0
    fingerprint: str = ""
    full_slots: int = 0
    swa_slots: int = 0
    mamba_slots: int = 0

    def __post_init__(self) -> None:
        _check_integers(self)
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {self.block_size}")
        if self.full_slot_bytes < 1:
            raise ValueError(f"full_slot_bytes must be at least 1, not {self.full_slot_bytes}")
        if (self.swa_slot_bytes > 0) != (self.swa_window_blocks > 0):
            raise ValueError(
                f"swa_slot_bytes ({self.swa_slot_bytes}) and swa_window_blocks ({self.swa_window_blocks}) "
                "go together: give both or none"
            )
        if self.swa_window_blocks > MAX_WINDOW_BLOCKS:
            raise ValueError(f"swa_window_blocks is {self.swa_window_blocks}, more than {MAX_WINDOW_BLOCKS}")
        if self.slot_align & (self.slot_align - 1):
            raise ValueError(f"slot_align must be a power of two or 0, not {self.slot_align}")
        if len(self.fingerprint.encode()) > MAX_FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint is longer than {MAX_FINGERPRINT_BYTES} bytes")
        if "\0" in self.fingerprint:
            raise ValueError(f"fingerprint must not hold a NUL, is {self.fingerprint!r}")

    def slot_bytes(self, component: ComponentType) -> int:
        """Bytes of one slot before alignment; 0 when the geometry lacks the component."""
        return (self.full_slot_bytes, self.swa_slot_bytes, self.mamba_slot_bytes)[component]

    def num_slots(self, component: ComponentType) -> int:
        """The count given for an index-only server; 0 when none was given."""
        return (self.full_slots, self.swa_slots, self.mamba_slots)[component]

    def window_blocks(self, component: ComponentType) -> int:
        """Blocks that a match needs this component for: FULL 0 (all), SWA its window, MAMBA 1."""
        return (0, self.swa_window_blocks, 1 if self.mamba_slot_bytes else 0)[component]


@dataclass(frozen=True)
class PoolGeometry:
    """One pool of slots as published.  ``offset`` is that of slot 0 in the SlotStore file, in bytes."""

    component: ComponentType
    num_slots: int
    slot_bytes: int
    stride: int
    window_blocks: int = 0
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.stride


@dataclass(frozen=True)
class PublishedGeometry:
    """A geometry with its counts: what the regions are made from and every later client must match."""

    block_size: int
    slot_align: int
    register_chunk_tokens: int
    fingerprint: str
    pools: tuple[PoolGeometry, ...]  # FULL first; only pools that exist

    def pool(self, component: ComponentType) -> PoolGeometry | None:
        return next((pool for pool in self.pools if pool.component == component), None)

    def as_geometry(self) -> Geometry:
        """The client's side of it; counts are kept only where there are no strides (an index-only server)."""
        sizes = {f"{POOL_NAMES[pool.component]}_slot_bytes": pool.slot_bytes for pool in self.pools}
        counts = {
            f"{POOL_NAMES[pool.component]}_slots": pool.num_slots for pool in self.pools if not pool.stride
        }
        swa = self.pool(ComponentType.SWA)
        return Geometry(
            self.block_size,
            swa_window_blocks=swa.window_blocks if swa else 0,
            slot_align=self.slot_align,
            register_chunk_tokens=self.register_chunk_tokens,
            fingerprint=self.fingerprint,
            **sizes,
            **counts,
        )

    def check_shapes(self, geometry: Geometry) -> None:
        """``check_same_geometry`` for a client, whose zero fields take whatever was published."""
        check_same_geometry(
            self,
            geometry,
            slot_align=self.slot_align,
            register_chunk_tokens=self.register_chunk_tokens,
        )

    def as_dict(self) -> dict[str, Any]:
        """The shape of ``RadixClient.geometry``."""
        return {
            "block_size": self.block_size,
            "slot_align": self.slot_align,
            "register_chunk_tokens": self.register_chunk_tokens,
            "fingerprint": self.fingerprint,
            "pools": {POOL_NAMES[pool.component]: _pool_dict(pool) for pool in self.pools},
        }

    def lay_out(self, page_bytes: int) -> tuple[PublishedGeometry, int]:
        """Place the pools behind a header page; returns the placed geometry and the file's bytes.

        Pools follow each other, each at a multiple of ``max(slot_align, 64)``; the file ends on a page.
        """
        align = max(self.slot_align, MIN_POOL_ALIGN)
        end, placed = page_bytes, []
        for pool in self.pools:
            placed.append(replace(pool, offset=round_up(end, align)))
            end = placed[-1].offset + pool.num_bytes
        return replace(self, pools=tuple(placed)), round_up(end, page_bytes)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def plan_geometry(
    geometry: Geometry,
    *,
    data_bytes: int = 0,
    swa_ratio: float = 0.0,
    mamba_ratio: float = 0.0,
    slot_align: int = DEFAULT_SLOT_ALIGN,
    register_chunk_tokens: int = DEFAULT_REGISTER_CHUNK_TOKENS,
) -> PublishedGeometry:
    """Decide the slot counts for a client's geometry from the server's budget.

    ``data_bytes`` is the budget for slots alone; 0 means an index-only server, whose counts come
    with the geometry.  Raises ValueError naming the flag or field that has to change.
    """
    align = geometry.slot_align or slot_align
    if data_bytes:
        ratios = {ComponentType.SWA: swa_ratio, ComponentType.MAMBA: mamba_ratio}
        counts = _count_from_budget(geometry, data_bytes, ratios, align)
    else:
        counts = _count_given(geometry)
    for component, count in counts.items():
        if count > MAX_SLOTS:
            raise ValueError(
                f"{count} {component.name} slots are more than {MAX_SLOTS}: lower --data-bytes or the count"
            )
    pools = tuple(
        PoolGeometry(
            component,
            count,
            geometry.slot_bytes(component),
            round_up(geometry.slot_bytes(component), align) if data_bytes else 0,
            geometry.window_blocks(component),
        )
        for component, count in counts.items()
    )
    return PublishedGeometry(
        geometry.block_size,
        align,
        geometry.register_chunk_tokens or register_chunk_tokens,
        geometry.fingerprint,
        pools,
    )


def check_same_geometry(
    published: PublishedGeometry,
    geometry: Geometry,
    *,
    slot_align: int = DEFAULT_SLOT_ALIGN,
    register_chunk_tokens: int = DEFAULT_REGISTER_CHUNK_TOKENS,
) -> None:
    """Raise GeometryMismatch, showing both sides, unless ``geometry`` describes ``published``.

    Zero fields that mean "the server's" are compared after they are filled in.  Counts are compared
    where the client gave them.  Fingerprints differ only when both are non-empty.
    """
    ours, theirs = _comparable(published), _filled_in(geometry, slot_align, register_chunk_tokens)
    for component in ComponentType:
        if not geometry.num_slots(component):
            ours.pop(f"{POOL_NAMES[component]}_slots", None)
    if not published.fingerprint or not geometry.fingerprint:
        ours.pop("fingerprint")
    different = [key for key in ours if ours[key] != theirs[key]]
    if different:
        raise GeometryMismatch(
            f"the client's geometry differs from the server's in {', '.join(different)}: "
            f"server {_show(_comparable(published))}; client {_show(theirs)}"
        )


def _check_integers(geometry: Geometry) -> None:
    for field, value in vars(geometry).items():
        if field == "fingerprint":
            if not isinstance(value, str):
                raise TypeError(f"fingerprint must be a str, not {type(value).__name__}")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{field} must be an int, not {type(value).__name__}")
        elif value < 0:
            raise ValueError(f"{field} must not be negative, is {value}")
        elif value > 2**63 - 1 or (not field.endswith("_slot_bytes") and value > 2**32 - 1):
            raise ValueError(f"{field} is {value}: out of range")


def _pool_dict(pool: PoolGeometry) -> dict[str, int]:
    shape = {"num_slots": pool.num_slots, "slot_bytes": pool.slot_bytes}
    if pool.component == ComponentType.SWA:
        shape["window_blocks"] = pool.window_blocks
    return shape


def _count_from_budget(
    geometry: Geometry, data_bytes: int, ratios: dict[ComponentType, float], align: int
) -> dict[ComponentType, int]:
    given = [f"{POOL_NAMES[c]}_slots" for c in ComponentType if geometry.num_slots(c)]
    if given:
        raise ValueError(f"{', '.join(given)}: only for a server without --data-bytes; leave them at 0")
    sides, left = {}, data_bytes
    for component, ratio in ratios.items():
        if geometry.slot_bytes(component):
            stride = round_up(geometry.slot_bytes(component), align)
            sides[component] = _count_side(component, stride, ratio, data_bytes)
            left -= sides[component] * stride
    stride = round_up(geometry.full_slot_bytes, align)
    num_full = max(left, 0) // stride
    if num_full < 1:
        taken = f" after {data_bytes - left} bytes for {', '.join(c.name for c in sides)}" if sides else ""
        raise ValueError(f"--data-bytes {data_bytes} holds no FULL slot of {stride} bytes{taken}: raise it")
    return {ComponentType.FULL: num_full, **sides}


def _count_side(component: ComponentType, stride: int, ratio: float, data_bytes: int) -> int:
    flag = f"--{POOL_NAMES[component]}-ratio"
    if not ratio:
        raise ValueError(f"the geometry has {component.name} slots: start radix-server with {flag}")
    count = count_by_ratio(ratio, data_bytes, stride)
    if count < 1:
        raise ValueError(
            f"{flag} {ratio} of --data-bytes {data_bytes} holds no {component.name} slot of {stride} bytes: "
            "raise either"
        )
    return count


def count_by_ratio(ratio: float, data_bytes: int, stride: int) -> int:
    """``floor(round(ratio * data_bytes / stride, 6))`` in decimal arithmetic.

    The rounding lets a ratio that was printed from a float give the count that it was made from.
    """
    with localcontext() as context:
        context.prec = 60
        exact = Decimal(str(ratio)) * data_bytes / stride
        return int(round(exact, 6).to_integral_value(rounding=ROUND_FLOOR))


def _count_given(geometry: Geometry) -> dict[ComponentType, int]:
    counts = {}
    for component in ComponentType:
        field, count = f"{POOL_NAMES[component]}_slots", geometry.num_slots(component)
        if geometry.slot_bytes(component) and not count:
            raise ValueError(f"{field} is 0: a server without --data-bytes takes it from the geometry")
        if count and not geometry.slot_bytes(component):
            raise ValueError(f"{field} is {count} but {POOL_NAMES[component]}_slot_bytes is 0")
        if count:
            counts[component] = count
    return counts


def _comparable(published: PublishedGeometry) -> dict[str, int | str]:
    pools = {component: published.pool(component) for component in ComponentType}
    shape: dict[str, int | str] = {"block_size": published.block_size}
    for component, pool in pools.items():
        shape[f"{POOL_NAMES[component]}_slot_bytes"] = pool.slot_bytes if pool else 0
        shape[f"{POOL_NAMES[component]}_slots"] = pool.num_slots if pool else 0
    swa = pools[ComponentType.SWA]
    shape["swa_window_blocks"] = swa.window_blocks if swa else 0
    shape["slot_align"] = published.slot_align
    shape["register_chunk_tokens"] = published.register_chunk_tokens
    shape["fingerprint"] = published.fingerprint
    return shape


def _filled_in(geometry: Geometry, slot_align: int, register_chunk_tokens: int) -> dict[str, int | str]:
    filled = replace(
        geometry,
        slot_align=geometry.slot_align or slot_align,
        register_chunk_tokens=geometry.register_chunk_tokens or register_chunk_tokens,
    )
    return dict(vars(filled))


def _show(fields: dict[str, int | str]) -> str:
    return "(" + ", ".join(f"{key}={fields[key]!r}" for key in sorted(fields) if fields[key]) + ")"
