from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixshmem.arrays import as_hashes, as_integer, as_number, as_slots, as_tokens, check_text

CONVERTERS = [(as_hashes, np.uint64), (as_slots, np.int32), (as_tokens, np.int64)]


@pytest.mark.parametrize(("convert", "dtype"), CONVERTERS)
def test_the_right_dtype_is_not_copied(convert: Callable[[Any], Any], dtype: type) -> None:
    array = np.arange(5, dtype=dtype)
    assert convert(array) is array


@pytest.mark.parametrize(("convert", "dtype"), CONVERTERS)
@pytest.mark.parametrize("given", [np.int8, np.uint16, np.int64, np.uint64, ">i8"])
def test_any_integer_dtype_is_converted(convert: Callable[[Any], Any], dtype: type, given: Any) -> None:
    converted = convert(np.arange(5).astype(given))
    assert converted.dtype == dtype
    assert converted.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("convert", "dtype"), CONVERTERS)
@pytest.mark.parametrize(
    "given", [[1, 2], np.arange(3.0), np.array([True]), np.array([None]), memoryview(b"x"), 5]
)
def test_other_types_are_refused_by_name(convert: Callable[[Any, str], Any], dtype: type, given: Any) -> None:
    with pytest.raises(TypeError, match="argument_x"):
        convert(given, "argument_x")


@pytest.mark.parametrize(("convert", "dtype"), CONVERTERS)
def test_other_shapes_are_refused_by_name(convert: Callable[[Any, str], Any], dtype: type) -> None:
    flat = np.arange(6, dtype=dtype)
    for array in (flat.reshape(2, 3), flat[::2], flat[::-1], np.array(1, dtype)):
        with pytest.raises(ValueError, match="argument_x"):
            convert(array, "argument_x")


def test_signed_hashes_keep_their_bits() -> None:
    assert as_hashes(np.array([-1], np.int64)).tolist() == [2**64 - 1]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32, 2**63 - 1])
def test_a_slot_beyond_int32_is_refused_not_wrapped(value: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        as_slots(np.array([0, value], np.int64))


@pytest.mark.parametrize("value", [None, "1", b"1", [1], {}, 1j, np.array([1, 2]), np.array([])])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="argument_x"):
        as_number(value, "argument_x")
    with pytest.raises(TypeError, match="argument_x"):
        as_integer(value, "argument_x")


def test_numbers_of_any_kind_are_floats_and_nan_is_none() -> None:
    assert [as_number(value, "x") for value in (1, 1.5, np.float32(2), np.int64(3), float("inf"))] == [
        1.0,
        1.5,
        2.0,
        3.0,
        float("inf"),
    ]
    with pytest.raises(ValueError, match="argument_x"):
        as_number(float("nan"), "argument_x")


@pytest.mark.parametrize("value", [None, 1, b"x", ["x"], np.array([])])
def test_what_is_no_text_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="argument_x"):
        check_text(value, "argument_x")
