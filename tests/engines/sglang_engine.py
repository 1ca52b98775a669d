"""An SGLang engine that a test drives (engine_protocol.py)."""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
import zmq
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
    if version("sglang") == "0.5.20":  # its page allocator is made of Triton kernels
        os.environ["TRITON_INTERPRET"] = "1"
    import sglang
    from sglang.srt.disaggregation.kv_events import KVEventBatch
    from sglang.srt.managers.io_struct import GenerateReqInput

    options["model_path"] = options.pop("model")
    events_port = options.pop("events_port", None)
    listener = zmq.Context.instance().socket(zmq.SUB)
    if events_port is not None:
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{events_port}"}
        options["kv_events_config"] = json.dumps(config)
        listener.connect(f"tcp://127.0.0.1:{events_port}")
        listener.subscribe(b"")
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

    def events() -> list[dict[str, Any]]:
        """What was published since the last call: fields and type of each event, by SGLang's own types."""
        heard: list[Any] = []
        while listener.poll(0):
            _, _, payload = listener.recv_multipart()
            heard += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return [{"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in heard]

    return {"generate": generate, "flush": flush, "events": events, "shutdown": engine.shutdown}


if __name__ == "__main__":
    serve(start)
