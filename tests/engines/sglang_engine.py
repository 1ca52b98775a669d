"""An SGLang engine that a test drives (engine_protocol.py)."""

from collections.abc import Callable
from typing import Any

from engine_protocol import serve

DEFAULTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.3,
    "context_length": 1024,
    "page_size": 32,
    "max_running_requests": 1,
    "log_level": "info",
    "sleep_on_idle": True,
}


def start(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    import sglang
    from sglang.srt.managers.io_struct import GenerateReqInput

    options["model_path"] = options.pop("model")
    engine = sglang.Engine(**DEFAULTS | options)

    def generate(prompts: list[list[int]], num_tokens: int = 16, **keys: str) -> list[dict[str, Any]]:
        """keys: extra_key and cache_salt."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        answers = []
        for ids in prompts:
            request = GenerateReqInput(input_ids=ids, sampling_params=sampling, **keys)
            answer = engine.loop.run_until_complete(
                anext(engine.tokenizer_manager.generate_request(request, None))
            )
            meta = answer["meta_info"]
            answers.append({"tokens": answer["output_ids"], "num_cached": meta["cached_tokens"]})
        return answers

    def flush() -> bool:
        """Empty the device cache."""
        return bool(engine.flush_cache().success)

    return {"generate": generate, "flush": flush, "shutdown": engine.shutdown}


if __name__ == "__main__":
    serve(start)
