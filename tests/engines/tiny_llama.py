"""Write a tiny Llama with real weights: same directory, same outputs, in every engine and on every run.

    python tiny_llama.py DIRECTORY [--seed 7] [--layers 4] [--width 1]

The weights are far larger than an engine's own `dummy` ones, whose logits hardly depend on the KV cache:
with these a wrong KV block changes the tokens, so that equal tokens mean equal blocks.  Its tokenizer knows
the words w0 ... w511.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

VOCAB, HEAD_SIZE = 512, 32
WEIGHT_SCALE = 0.3


class Shape:
    """Dimensions; width multiplies what a layer holds and computes."""

    def __init__(self, num_layers: int, width: int) -> None:
        self.num_layers = num_layers
        self.hidden, self.intermediate = 128 * width, 256 * width
        self.num_heads, self.num_kv_heads = 4 * width, 2 * width

    def config(self) -> dict[str, object]:
        """The model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": HEAD_SIZE,
            "vocab_size": VOCAB,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "initializer_range": WEIGHT_SCALE,
            "torch_dtype": "float32",
        }


def weights(shape: Shape, seed: int) -> dict[str, NDArray[np.float32]]:
    """All tensors by their Hugging Face names, float32."""
    generator = np.random.default_rng(seed)
    scale = WEIGHT_SCALE * (128 / shape.hidden) ** 0.5

    def normal(*dimensions: int) -> NDArray[np.float32]:
        return (generator.standard_normal(dimensions) * scale).astype(np.float32)

    ones = np.ones(shape.hidden, dtype=np.float32)
    queries, keys = shape.num_heads * HEAD_SIZE, shape.num_kv_heads * HEAD_SIZE
    tensors = {"model.embed_tokens.weight": normal(VOCAB, shape.hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": normal(queries, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(keys, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(keys, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(shape.hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": normal(shape.hidden, shape.intermediate),
        }
    tensors |= {"model.norm.weight": ones, "lm_head.weight": normal(VOCAB, shape.hidden)}
    return tensors


def tokenizer() -> dict[str, object]:
    """tokenizer.json: one token a word."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{token}": token for token in range(VOCAB)},
            "unk_token": "w2",
        },
    }


def write_model(directory: Path, *, seed: int = 7, num_layers: int = 4, width: int = 1) -> Path:
    """Make the model in `directory` (created if need be) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = Shape(num_layers, width)
    files = {
        "config.json": shape.config(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192},
    }
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents, indent=1) + "\n")
    save_file(weights(shape, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1)
    options = parser.parse_args()
    print(write_model(options.directory, seed=options.seed, num_layers=options.layers, width=options.width))


if __name__ == "__main__":
    main()
