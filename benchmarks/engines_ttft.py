"""Time to a prompt's first token in vLLM: computed, or loaded from the node's cache.

    python -m benchmarks.engines_ttft [--prompts 10] [--tokens 1500]

For each prompt in turn: an engine without cache; vLLM's own file-sharing ExampleConnector, first and second
time; our connector, first time, again in the same engine, and in another engine that never saw the prompt.
Needs the environment of tests/engines/setup_vllm.sh with this package installed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import numpy as np
from rich.console import Console

from benchmarks.engines_setup import Stores, bench
from benchmarks.report import result_table
from benchmarks.row import Row

NUM_TOKENS = 2
ENGINE_MEMORY_BYTES = 256 << 20


def measure(num_prompts: int, num_tokens: int) -> dict[str, list[float]]:
    """Seconds to the first token, per prompt, of each way to get it."""
    with bench("--layers", "8", "--width", "4") as here, tempfile.TemporaryDirectory() as shared:
        server = here.server("1G")
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": shared},
        }
        options = {"kv_cache_memory_bytes": ENGINE_MEMORY_BYTES}
        plain = here.engine(None, **options)
        files = here.engine(None, kv_transfer_config=example, **options)
        first, second = here.engine(server, **options), here.engine(server, **options)
        stores, generator = Stores(server), np.random.default_rng(1)
        times: dict[str, list[float]] = {}
        for number in range(num_prompts + 1):  # the first one warms the engines up
            prompt = generator.integers(2, 512, num_tokens).tolist()
            for name, engine in (
                ("no cache", plain),
                ("ExampleConnector, first time", files),
                ("ExampleConnector, again", files),
                ("radixshmem, first time", first),
                ("radixshmem, again", first),
                ("radixshmem, in another engine", second),
            ):
                (output,) = engine.generate(prompt, num_tokens=NUM_TOKENS)
                if number:
                    times.setdefault(name, []).append(output["first_token_s"])
                if name == "radixshmem, first time":
                    stores.expect(prompt, NUM_TOKENS)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1500)
    options = parser.parse_args()
    times = measure(options.prompts, options.tokens)
    baseline = statistics.median(times["no cache"])
    rows = [
        Row(
            f"first token of {options.tokens}: {name}",
            f"{statistics.median(seconds) * 1000:.1f} ms",
            limit=f"{statistics.median(seconds) / baseline:.2f} of no cache",
            value=statistics.median(seconds),
        )
        for name, seconds in times.items()
    ]
    result_table(Console(), rows)


if __name__ == "__main__":
    main()
