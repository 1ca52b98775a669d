from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from radixshmem import hash_blocks


def test_known_vectors() -> None:
    tokens = np.arange(64, dtype=np.int64)
    assert hash_blocks(tokens, 16).tolist() == [
        50805424035424587,
        2598674594981696037,
        748297365310093078,
        14144226175942821585,
    ]
    namespace = np.frombuffer(b"a\0b", np.uint8).astype(np.int64)
    assert int(hash_blocks(tokens, 16, namespace)[0]) == 10833508028743192151


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 1000])
@pytest.mark.parametrize("num_prefix", [0, 1, 5])
@pytest.mark.parametrize("bounds", [(0, 2**17), (0, 2**32), (0, 2**32 + 10), (-1, 2**17), (-(2**63), 2**63)])
def test_chain_is_streaming_xxh64(block_size: int, num_prefix: int, bounds: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed=block_size * 10 + num_prefix)
    tokens = rng.integers(*bounds, 2500, dtype=np.int64)
    prefix = rng.integers(-(2**63), 2**63, num_prefix, dtype=np.int64)
    state, expected = xxhash.xxh64(prefix.tobytes(), seed=0), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        state.update(tokens[start : start + block_size].tobytes())
        expected.append(state.intdigest())
    hashes = hash_blocks(tokens, block_size, prefix)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == expected


def test_a_rest_is_ignored() -> None:
    tokens = np.arange(47, dtype=np.int64)
    assert hash_blocks(tokens, 16).tolist() == hash_blocks(tokens[:32], 16).tolist()
    assert len(hash_blocks(tokens[:15], 16)) == 0
    assert len(hash_blocks(tokens[:0], 16)) == 0


def test_integer_dtypes_mean_their_values() -> None:
    tokens = np.arange(64, dtype=np.int64)
    for dtype in (np.int32, np.uint16, np.uint64):
        assert hash_blocks(tokens.astype(dtype), 16).tolist() == hash_blocks(tokens, 16).tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], 16), TypeError, "tokens"),
        ((np.arange(4.0), 16), TypeError, "tokens"),
        ((np.zeros((2, 2), np.int64), 16), ValueError, "tokens"),
        ((np.arange(8), 0), ValueError, "block_size"),
        ((np.arange(8), -1), ValueError, "block_size"),
        ((np.arange(8), 2**32), ValueError, "block_size"),
        ((np.arange(8), 2.0), TypeError, "block_size"),
        ((np.arange(8), 2, "namespace"), TypeError, "prefix"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hash_blocks(*arguments)
