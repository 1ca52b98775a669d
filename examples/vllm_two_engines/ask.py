"""Ask servers with OpenAI's interface the same long question, one after the other.

    python ask.py http://127.0.0.1:8001 http://127.0.0.1:8002

Prints what each took until its first word, and how many of the prompt's tokens it had not to compute.
"""

import json
import random
import sys
import time
import urllib.request
from typing import Any

START_TIMEOUT_S = 900.0


def await_server(url: str) -> str:
    """Name of the model that url serves, once it does."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1)


def ask(url: str, model: str, prompt: str) -> tuple[str, float, int]:
    """(answer, seconds until its first word, tokens of the prompt that were cached)."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    start_s, first_s, text, cached = time.monotonic(), 0.0, "", 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[len(b"data: ") :])
            first_s = first_s or time.monotonic() - start_s
            text += "".join(choice["text"] for choice in event["choices"])
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
    return text, first_s, cached


def main() -> None:
    urls = sys.argv[1:]
    models = [await_server(url) for url in urls]
    generator = random.Random(1)
    question = " ".join(f"w{generator.randrange(2, 512)}" for _ in range(1500))
    ask(urls[0], models[0], "w5 w6 w7")  # the first request of an engine takes longer
    ask(urls[-1], models[-1], "w5 w6 w7")
    answers = set()
    print(f"{'server':<28} {'first word':>12} {'cached tokens':>14}")
    for url, model in zip(urls, models, strict=True):
        text, first_s, cached = ask(url, model, question)
        answers.add(text)
        print(f"{url:<28} {first_s * 1000:>9.0f} ms {cached:>14}")
        time.sleep(1)  # a finished request is stored in the background
    print("answers are equal" if len(answers) == 1 else f"answers differ: {answers}")


if __name__ == "__main__":
    main()
