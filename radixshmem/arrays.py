"""The arguments of the public API: what is accepted, and what is said otherwise."""

from __future__ import annotations

import math
import numbers
import operator
from typing import SupportsIndex, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

U8Array: TypeAlias = NDArray[np.uint8]
U64Array: TypeAlias = NDArray[np.uint64]
I64Array: TypeAlias = NDArray[np.int64]
I32Array: TypeAlias = NDArray[np.int32]

UINT64 = np.dtype(np.uint64)
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)


def as_hashes(hashes: NDArray[np.integer], name: str = "hashes") -> U64Array:
    """``hashes`` as uint64 [n]; other integer dtypes are converted modulo 2**64."""
    _check_vector(hashes, name)
    return cast(U64Array, hashes) if hashes.dtype is UINT64 else hashes.astype(np.uint64)


def as_slots(slots: NDArray[np.integer], name: str = "slots") -> I32Array:
    """``slots`` as int32 [n]; a value that is no slot id raises ValueError."""
    _check_vector(slots, name)
    if slots.dtype is _INT32:
        return cast(I32Array, slots)
    converted = slots.astype(np.int32)
    if not np.array_equal(converted, slots):
        raise ValueError(f"{name} holds values that do not fit int32")
    return converted


def as_tokens(tokens: NDArray[np.integer], name: str = "tokens") -> I64Array:
    """``tokens`` as int64 [n]; other integer dtypes are converted."""
    _check_vector(tokens, name)
    return cast(I64Array, tokens) if tokens.dtype is _INT64 else tokens.astype(np.int64)


def as_integer(value: SupportsIndex, name: str) -> int:
    """``value`` as an int; TypeError for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None


def as_number(value: float, name: str) -> float:
    """``value`` as a float, which may be infinite; TypeError for what is no number, ValueError for NaN."""
    if not issubclass(type(value), numbers.Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, not nan")
    return number


def check_text(value: str, name: str) -> str:
    """``value``, if it is a str; TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def _check_vector(array: NDArray[np.integer], name: str) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must have an integer dtype, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous")
