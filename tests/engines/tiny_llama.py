"""Write a tiny Llama with real weights: same directory, same outputs, in every engine and on every run.

    python tiny_llama.py DIRECTORY [--seed 7] [--layers 4]

The weights are far larger than an engine's own `dummy` ones, whose logits hardly depend on the KV cache:
with these a wrong KV block changes the tokens, so that equal tokens mean equal blocks.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, VOCAB = 128, 256, 512
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 32
WEIGHT_SCALE = 0.3


def config(num_layers: int, max_positions: int = 8192) -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCAB,
        "max_position_embeddings": max_positions,
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


def weights(num_layers: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """All tensors by their Hugging Face names, float32."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (generator.standard_normal(shape) * WEIGHT_SCALE).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": normal(NUM_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(NUM_KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(NUM_KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(HIDDEN, NUM_HEADS * HEAD_SIZE),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    tensors |= {"model.norm.weight": ones, "lm_head.weight": normal(VOCAB, HIDDEN)}
    return tensors


def write_model(directory: Path, *, seed: int = 7, num_layers: int = 4) -> Path:
    """Make the model in `directory` (created if need be) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(num_layers), indent=2) + "\n")
    save_file(weights(num_layers, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    print(write_model(options.directory, seed=options.seed, num_layers=options.layers))


if __name__ == "__main__":
    main()
