"""Write a LoRA adapter for the tiny Llama (tiny_llama.py), in PEFT's format.

    python tiny_lora.py MODEL DIRECTORY [--seed 1]

Like the model's, its weights are large: with it every prompt has another KV and another answer.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

RANK, SCALE = 8, 0.2


def adapter_weights(config: dict[str, int], seed: int) -> dict[str, NDArray[np.float32]]:
    """Both factors of each projection's change, by PEFT's names, float32."""
    generator = np.random.default_rng(seed)
    hidden, head_size = config["hidden_size"], config["head_dim"]
    outputs = {"k_proj": config["num_key_value_heads"] * head_size}
    outputs |= {"v_proj": outputs["k_proj"], "q_proj": config["num_attention_heads"] * head_size}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, width in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for factor, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                values = generator.standard_normal(shape) * SCALE
                tensors[f"{name}.{factor}.weight"] = values.astype(np.float32)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(options.model),
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (options.directory / "adapter_config.json").write_text(json.dumps(description, indent=1) + "\n")
    model = json.loads((options.model / "config.json").read_text())
    save_file(adapter_weights(model, options.seed), options.directory / "adapter_model.safetensors")
    print(options.directory)


if __name__ == "__main__":
    main()
