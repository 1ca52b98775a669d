"""What a router would ask: which worker has how much of a prompt?

python route.py http://127.0.0.1:8001 http://127.0.0.1:8090 [BLOCK_SIZE tcp://127.0.0.1:5557 tcp://127.0.0.1:5558]

An engine, Dynamo's indexer; with the engine's block size and endpoints of its events and of their replay the
indexer is told to listen to it.
"""

import json
import random
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm_two_engines"))
from ask import ask, await_server


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def register(indexer: str, block_size: int, endpoint: str, replay_endpoint: str) -> None:
    """Let the indexer listen to worker 1, and ask for what it missed."""
    worker = {"instance_id": 1, "model_name": "default", "block_size": block_size}
    post(f"{indexer}/register", worker | {"endpoint": endpoint, "replay_endpoint": replay_endpoint})


def cached_tokens(indexer: str, tokens: list[int]) -> dict[str, int]:
    """Tokens of the prompt that each worker has in host memory."""
    answer = post(f"{indexer}/query", {"token_ids": tokens, "model_name": "default"})
    return {worker: known["cpu"] for worker, known in answer["instances"].items()}


def main() -> None:
    engine, indexer, *registration = sys.argv[1:]
    model = await_server(engine)
    if registration:
        register(indexer, int(registration[0]), *registration[1:])
    generator = random.Random(1)
    question = " ".join(f"w{generator.randrange(2, 512)}" for _ in range(1500))
    tokens = post(f"{engine}/tokenize", {"model": model, "prompt": question})["tokens"]
    print(f"before: {cached_tokens(indexer, tokens)}")
    ask(engine, model, question)
    for _ in range(20):
        time.sleep(1)
        ask(engine, model, "w5 w6 w7")  # an engine tells of its events when it makes a step
        if known := cached_tokens(indexer, tokens):
            print(f"after:  {known} of {len(tokens)} tokens")
            return
    raise SystemExit("the indexer did not hear of the prompt")


if __name__ == "__main__":
    main()
