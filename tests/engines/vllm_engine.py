"""A vLLM engine that a test drives (engine_protocol.py)."""

from collections.abc import Callable
from typing import Any

from engine_protocol import serve
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

DEFAULTS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 1,
    "disable_log_stats": False,
}


def start(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    transfer = options.pop("kv_transfer_config", None)
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLM(**DEFAULTS | options)

    def generate(
        prompts: list[list[int]],
        num_tokens: int = 16,
        salt: str | None = None,
        lora: tuple[str, int, str] | None = None,
        judges_prompt: bool = False,
    ) -> list[dict[str, Any]]:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=1 if judges_prompt else None,
        )
        inputs = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        request = LoRARequest(*lora) if lora else None
        outputs = engine.generate(inputs, sampling, use_tqdm=False, lora_request=request)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "num_cached": output.num_cached_tokens,
                "first_token_s": output.metrics.first_token_latency if output.metrics else None,
                "regrets": _regrets(ids, output.prompt_logprobs) if judges_prompt else None,
            }
            for ids, output in zip(prompts, outputs, strict=True)
        ]

    def metrics() -> dict[str, float]:
        """Counters by name, summed over their labels."""
        totals: dict[str, float] = {}
        for metric in engine.get_metrics():
            if hasattr(metric, "value"):
                totals[metric.name] = totals.get(metric.name, 0) + metric.value
        return totals

    def reset_cache() -> bool:
        return bool(engine.llm_engine.reset_prefix_cache(reset_connector=True))

    return {"generate": generate, "metrics": metrics, "reset_cache": reset_cache}


def _regrets(prompt: list[int], steps: Any) -> list[float]:
    """How far the likeliest log-probability is above that of the prompt's token, from its second one on."""
    return [
        max(entry.logprob for entry in step.values()) - step[token].logprob
        for token, step in zip(prompt[1:], steps[1:], strict=True)
    ]


if __name__ == "__main__":
    serve(start)
