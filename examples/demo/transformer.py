"""A small decoder-only transformer in numpy: RMSNorm, rotary attention, gated MLP, greedy decoding.

The weights are random (seeded), so its text is nonsense; its keys and values are as real as any: change
one of them and the output changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.  Tokens are bytes of text, so the vocabulary is 256."""

    num_layers: int = 4
    num_heads: int = 8
    head_dim: int = 32
    mlp_dim: int = 1024
    vocab: int = 256
    max_tokens: int = 4096
    chunk_tokens: int = 32
    seed: int = 1

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    def kv_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Keys and values of ``num_tokens`` tokens: layer, key or value, token, head, dimension."""
        return (self.num_layers, 2, num_tokens, self.num_heads, self.head_dim)


class Transformer:
    """Runs tokens through the model, reading and extending a KV array of ``Shape.kv_shape``.

    Tokens are always computed in the same chunks, counted from the start of the sequence.  So a matrix
    product has the same operands whether the tokens before the chunk were computed here or read from a
    cache, and the results are equal to the last bit.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.seed)
        d, m = shape.hidden, shape.mlp_dim
        self.embedding = rng.standard_normal((shape.vocab, d), np.float32)
        self.layers = [
            # A gain above 1 on queries and keys makes attention choosy, as that of a trained model is.
            {
                "q": _weight(rng, d, d, 1.6),
                "k": _weight(rng, d, d, 1.6),
                "v": _weight(rng, d, d),
                "o": _weight(rng, d, d),
                "gate": _weight(rng, d, m),
                "up": _weight(rng, d, m),
                "down": _weight(rng, m, d),
            }
            for _ in range(shape.num_layers)
        ]
        self.head = _weight(rng, d, shape.vocab)
        self.cos, self.sin = _rotation(shape)

    def new_kv(self) -> Floats:
        """An empty KV array for one sequence."""
        return np.zeros(self.shape.kv_shape(self.shape.max_tokens), np.float32)

    def prefill(self, tokens: Tokens, kv: Floats, start: int = 0) -> Floats:
        """Compute ``tokens[start:]`` and return the logits (float32 [vocab]) after the last token.

        ``kv`` holds keys and values of the first ``start`` tokens, a multiple of ``chunk_tokens``.
        """
        logits = np.empty(0, np.float32)
        for first in range(start, len(tokens), self.shape.chunk_tokens):
            logits = self.forward(tokens[first : first + self.shape.chunk_tokens], kv, first)
        return logits

    def decode(self, logits: Floats, kv: Floats, position: int, num_tokens: int) -> list[int]:
        """The ``num_tokens`` most likely tokens, one after the other, from ``position`` on."""
        output = [int(logits.argmax())]
        for i in range(num_tokens - 1):
            logits = self.forward(np.array(output[-1:]), kv, position + i)
            output.append(int(logits.argmax()))
        return output

    def forward(self, tokens: Tokens, kv: Floats, first: int) -> Floats:
        """Logits after the last of ``tokens``, which stand at positions ``first`` and up."""
        x = self.embedding[tokens]
        for weights, layer_kv in zip(self.layers, kv, strict=True):
            x = x + self._attend(_rms_norm(x), weights, layer_kv, first)
            normed = _rms_norm(x)
            x = x + (_silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"]
        last: Floats = _rms_norm(x[-1:]) @ self.head
        return last.reshape(-1)

    def _attend(self, x: Floats, weights: dict[str, Floats], kv: Floats, first: int) -> Floats:
        heads = (len(x), self.shape.num_heads, self.shape.head_dim)
        end = first + len(x)
        kv[0, first:end] = self._rotate((x @ weights["k"]).reshape(heads), first)
        kv[1, first:end] = (x @ weights["v"]).reshape(heads)
        queries = self._rotate((x @ weights["q"]).reshape(heads), first)
        keys, values = kv[0, :end], kv[1, :end]
        scores = queries.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) / np.sqrt(np.float32(heads[2]))
        future = np.arange(end) > np.arange(first, end)[:, None]
        scores[:, future] = -np.inf
        mixed = _softmax(scores) @ values.transpose(1, 0, 2)
        return np.asarray(mixed.transpose(1, 0, 2).reshape(x.shape) @ weights["o"])

    def _rotate(self, x: Floats, first: int) -> Floats:
        cos, sin = self.cos[first : first + len(x), None], self.sin[first : first + len(x), None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _weight(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> Floats:
    return rng.standard_normal((rows, columns), np.float32) * np.float32(gain / np.sqrt(rows))


def _rotation(shape: Shape) -> tuple[Floats, Floats]:
    frequencies = 10000.0 ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = np.outer(np.arange(shape.max_tokens), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rms_norm(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6)))


def _silu(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-x)))


def _softmax(x: Floats) -> Floats:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))
