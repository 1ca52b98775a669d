"""What the driver is told for copy engines, carried out by a memcpy on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from shared_engine import EnginePart, kv_part, scramble
from test_round_trip import PARTS

from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.transfer.cuda_batch import BatchPlan
from flexkv_radix.transfer.cuda_rows import RowPlan, Rows, rows_of
from flexkv_radix.transfer.protocol import OpKind, TransferOp
from flexkv_radix.transfer.segments import Segment, coalesce
from radixshmem.geometry import ComponentType

NUM_SLOTS = 29
# Commands per block: layers of one tensor are rows of one command, tensors of their own are not.
NUM_COMMANDS = {
    "layerfirst": 1, "layerfirst-mla": 1, "layerfirst-per-layer": 3, "layerfirst-per-layer-kv": 6,
    "blockfirst": 1, "blockfirst-mla": 1, "layerblock": 1, "layerblock-mla": 1, "layerblock-per-layer": 3,
    "groups": 1 + 3 + 4, "opaque-tensors": 3, "opaque-one-storage": 1, "opaque-interleaved": 1,
}  # fmt: skip


class _Side(ctypes.Structure):
    _fields_ = [
        ("x_bytes", ctypes.c_size_t), ("y", ctypes.c_size_t), ("memory_type", ctypes.c_uint),
        ("host", ctypes.c_void_p), ("device", ctypes.c_uint64), ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]  # fmt: skip


class _Memcpy2d(ctypes.Structure):
    """CUDA_MEMCPY2D_v2, written from the driver API's documentation."""

    _fields_ = [("src", _Side), ("dst", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Memcpy2d), ctypes.c_void_p)


def _address(side: _Side) -> int:
    return {1: side.host, 2: side.device}[side.memory_type]


def _copy(pointer: ctypes.Array, stream: int) -> int:
    copy = pointer.contents
    assert stream == 77
    assert {copy.src.memory_type, copy.dst.memory_type} == {1, 2}
    for row in range(copy.height):
        to, source = (_address(side) + row * side.pitch for side in (copy.dst, copy.src))
        ctypes.memmove(to, source, copy.width)
    return 0


def _rows(part: EnginePart) -> list[Rows]:
    tensors = part.tensors
    return rows_of(
        [(s.tensor, tensors[s.tensor].ctypes.data, s) for s in coalesce(part.rank_part(0).segments)]
    )


_Batch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
)  # fmt: skip
_Batch12 = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


def _copy_batch(to, source, sizes, count, attributes, indices, num_attributes, stream) -> int:
    """cuMemcpyBatchAsync, written from the driver API's documentation."""
    assert 0 < count <= 512
    assert (num_attributes, stream) == (1, 77)
    assert (ctypes.c_int * 6).from_address(attributes)[:] == [1, 0, 0, 0, 0, 0]  # in stream order, no hints
    assert ctypes.c_size_t.from_address(indices).value == 0
    columns = [(ctypes.c_uint64 * count).from_address(array) for array in (to, source, sizes)]
    for copy_to, copy_from, num_bytes in zip(*columns, strict=True):
        ctypes.memmove(copy_to, copy_from, num_bytes)
    return 0


def _copy_batch_12(to, source, sizes, count, attributes, indices, num_attributes, failed, stream) -> int:
    assert failed
    return _copy_batch(to, source, sizes, count, attributes, indices, num_attributes, stream)


def _enqueuers(part: EnginePart, slots: np.ndarray) -> dict[str, Callable[[TransferOp], None]]:
    """Every way to queue an op; what ctypes made is kept alive by the functions returned."""
    rows = RowPlan(_rows(part), slots.ctypes.data, slots.shape[1])
    segments = coalesce(part.rank_part(0).segments)
    pieces = [(part.tensors[s.tensor].ctypes.data, s) for s in segments]
    batch = BatchPlan(pieces, slots.ctypes.data, slots.shape[1])
    functions = {"rows": _Function(_copy), "batch": _Batch(_copy_batch), "batch 12": _Batch12(_copy_batch_12)}

    def address(name: str) -> int:
        return ctypes.cast(functions[name], ctypes.c_void_p).value or 0

    return {
        "rows": lambda op: rows.enqueue(op, 77, address("rows")),
        "batch": lambda op: batch.enqueue(op, 77, (address("batch"), False)),
        "batch 12": lambda op: batch.enqueue(op, 77, (address("batch 12"), True)),
    }


@pytest.mark.parametrize("how", ["rows", "batch", "batch 12"])
@pytest.mark.parametrize("name", PARTS)
def test_commands_move_what_the_layout_says(name: str, how: str) -> None:
    part = PARTS[name]()
    assert len(_rows(part)) == NUM_COMMANDS[name]
    rng = np.random.default_rng(19)
    slots = np.zeros((NUM_SLOTS, part.share_bytes + 24), dtype=np.uint8)
    enqueue = _enqueuers(part, slots)[how]
    scramble(rng, slots, *part.tensors)
    blocks, ids = rng.permutation(part.num_blocks)[:5], rng.permutation(NUM_SLOTS)[:5].astype(np.int32)
    expected = slots.copy()
    expected[ids, : part.share_bytes] = part.blocks()[blocks]
    enqueue(TransferOp(1, OpKind.D2H, ComponentType.FULL, blocks, ids))
    assert np.array_equal(slots, expected)
    expected_blocks = part.blocks()
    targets = rng.permutation(part.num_blocks)[:5]
    expected_blocks[targets] = slots[ids, : part.share_bytes]
    enqueue(TransferOp(2, OpKind.H2D, ComponentType.FULL, targets, ids))
    assert np.array_equal(part.blocks(), expected_blocks)


def test_long_batches_are_cut() -> None:
    """1300 copies: two full driver calls and a short one."""
    part = kv_part(KVCacheLayoutType.LAYERFIRST, num_layers=50, num_tensors=100)
    slots = np.zeros((13, part.share_bytes), dtype=np.uint8)
    scramble(np.random.default_rng(21), *part.tensors)
    ids = np.arange(13)
    op = TransferOp(1, OpKind.D2H, ComponentType.FULL, ids, ids.astype(np.int32))
    _enqueuers(part, slots)["batch"](op)
    assert np.array_equal(slots, part.blocks())


def test_rows_do_not_span_allocations_or_exceed_the_pitch_limit() -> None:
    def segment(base: int, offset: int) -> Segment:
        return Segment(0, 0, base, 64, 64, offset)

    near = [(0, 0, segment(0, 0)), (0, 0, segment(4096, 64)), (0, 0, segment(8192, 128))]
    assert [rows.height for rows in rows_of(near)] == [3]
    apart = [near[0], (1, 0, near[1][2]), (1, 0, near[2][2])]
    assert [rows.height for rows in rows_of(apart)] == [1, 2]
    far = [(0, 0, segment(i << 31, 64 * i)) for i in range(3)]
    assert [rows.height for rows in rows_of(far)] == [1, 1, 1]
    backwards = [(0, 0, segment(8192 - 4096 * i, 64 * i)) for i in range(3)]
    assert [rows.height for rows in rows_of(backwards)] == [1, 1, 1]


def test_the_drivers_error_is_passed_on() -> None:
    part = PARTS["layerfirst"]()
    slots = np.zeros((NUM_SLOTS, part.share_bytes), dtype=np.uint8)
    plan = RowPlan(_rows(part), slots.ctypes.data, slots.shape[1])
    function = _Function(lambda copy, stream: 1)
    op = TransferOp(1, OpKind.D2H, ComponentType.FULL, np.arange(3), np.arange(3, dtype=np.int32))
    with pytest.raises(RuntimeError):
        plan.enqueue(op, 77, ctypes.cast(function, ctypes.c_void_p).value)
