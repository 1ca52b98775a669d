"""FlexKV's hash chain: published vectors, and an implementation that others wrote."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flexkv_radix.hashing import hash_tokens, names_within, namespace_words

TOKENS = np.arange(64, dtype=np.int64)
VERSIONS = st.sampled_from(["", "1", "2"])
NAMESPACES = st.lists(st.sampled_from(["", "1", "weights=", "weights=1", "weights=2"]), max_size=3)
VECTORS = [50805424035424587, 2598674594981696037, 748297365310093078, 14144226175942821585]


def test_vectors() -> None:
    assert hash_tokens(TOKENS, 16).tolist() == VECTORS
    assert hash_tokens(TOKENS, 16, []).tolist() == VECTORS
    assert hash_tokens(TOKENS, 16, ["a", "b"])[0] == 10833508028743192151


@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("namespace", [None, ["a"], ["tenant", "löra"], ["x" * 100]])
def test_against_xxhash(block: int, namespace: list[str] | None) -> None:
    tokens = np.random.default_rng(3).integers(-5, 1 << 40, 1000, dtype=np.int64)
    stream = xxhash.xxh64(seed=0)
    if namespace:
        stream.update(np.frombuffer("\0".join(namespace).encode(), np.uint8).astype("<i8").tobytes())
    expected = []
    for start in range(0, len(tokens) - block + 1, block):
        stream.update(tokens[start : start + block].astype("<i8").tobytes())
        expected.append(stream.intdigest())
    assert hash_tokens(tokens, block, namespace).tolist() == expected


def test_names_cannot_imitate_each_other() -> None:
    assert namespace_words(("ab", "c")).tolist() != namespace_words(("a", "bc")).tolist()
    with pytest.raises(ValueError, match="namespace"):
        hash_tokens(TOKENS, 16, ["a\0b"])
    with pytest.raises(TypeError, match=r"\['ab'\]"):
        hash_tokens(TOKENS, 16, "ab")


@given(NAMESPACES, NAMESPACES, VERSIONS, VERSIONS)
def test_versions_of_the_weights_cannot_be_imitated(
    names: list[str], others: list[str], weights: str, other_weights: str
) -> None:
    within, other = names_within(weights, names), names_within(other_weights, others)
    if within and other:
        same = "\0".join(within) == "\0".join(other)
        assert same == ((weights, names) == (other_weights, others))
    assert names_within("", ["tenant", *names]) == ("tenant", *names)
