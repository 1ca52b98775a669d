"""Blocks moved by a GPU's copy engine: rows of equal length and distance with one command each.

That suits parts whose segments form such rows (all layers in one tensor), or are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexkv_radix._copy import ffi, lib
from flexkv_radix.transfer.cuda_driver import check, find_function
from flexkv_radix.transfer.protocol import OpKind, TransferOp
from flexkv_radix.transfer.segments import Segment

MAX_PITCH_BYTES = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far


@dataclass(frozen=True)
class Rows:
    """`height` rows of `width_bytes`, which one command moves for a block."""

    engine: int  # address of row 0 of block 0
    block_stride_bytes: int
    engine_pitch_bytes: int
    slot_offset_bytes: int
    slot_pitch_bytes: int
    width_bytes: int
    height: int = 1


def rows_of(segments: Sequence[tuple[int, int, Segment]]) -> list[Rows]:
    """Join (allocation, tensor address, segment)s in slot order to as few rows as possible.

    Rows stay within one allocation: addresses of two have no fixed distance.
    """
    joined: list[Rows] = []
    last_allocation: int | None = None
    for allocation, address, s in segments:
        engine = address + s.base_bytes
        row = Rows(engine, s.block_stride_bytes, s.num_bytes, s.slot_offset_bytes, s.num_bytes, s.num_bytes)
        longer = _with_row(joined[-1], row) if joined and allocation == last_allocation else None
        if longer is not None:
            joined[-1] = longer
        else:
            joined.append(row)
        last_allocation = allocation
    return joined


def _with_row(rows: Rows, row: Rows) -> Rows | None:
    """rows and one more, or None if that is no row of theirs."""
    last = rows.height - 1
    engine_pitch = row.engine - (rows.engine + last * rows.engine_pitch_bytes)
    slot_pitch = row.slot_offset_bytes - (rows.slot_offset_bytes + last * rows.slot_pitch_bytes)
    if rows.height > 1 and (engine_pitch, slot_pitch) != (rows.engine_pitch_bytes, rows.slot_pitch_bytes):
        return None
    if (row.width_bytes, row.block_stride_bytes) != (rows.width_bytes, rows.block_stride_bytes):
        return None
    if min(engine_pitch, slot_pitch) < rows.width_bytes or max(engine_pitch, slot_pitch) > MAX_PITCH_BYTES:
        return None
    return replace(rows, engine_pitch_bytes=engine_pitch, slot_pitch_bytes=slot_pitch, height=rows.height + 1)


class RowPlan:
    """Queues an op's rows on a stream of the active device."""

    def __init__(self, rows: Sequence[Rows], pool_address: int, slot_stride_bytes: int) -> None:
        self._rows: Any = ffi.new(
            "copy_rows[]",
            [
                (
                    r.engine,
                    r.block_stride_bytes,
                    r.engine_pitch_bytes,
                    r.slot_offset_bytes,
                    r.slot_pitch_bytes,
                    r.width_bytes,
                    r.height,
                )
                for r in rows
            ],
        )
        self._pool_address = pool_address
        self._slot_stride_bytes = slot_stride_bytes

    def enqueue(self, op: TransferOp, stream: int, memcpy_2d: int = 0) -> None:
        """memcpy_2d: address of a function to call in place of the driver's."""
        code = lib.copy_enqueue(
            memcpy_2d or find_function("cuMemcpy2DAsync_v2"),
            stream,
            lib.COPY_TO_SLOTS if op.kind is OpKind.D2H else lib.COPY_FROM_SLOTS,
            self._rows,
            len(self._rows),
            self._pool_address,
            self._slot_stride_bytes,
            ffi.from_buffer("int64_t[]", op.gpu_blocks),
            ffi.from_buffer("int32_t[]", op.slots),
            len(op.slots),
        )
        check("cuMemcpy2DAsync", code)
