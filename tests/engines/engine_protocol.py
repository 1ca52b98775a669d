"""How a test talks to an engine process: one JSON object a line, on its stdin and on a copy of its stdout.

    {"do": "generate", "prompts": [[ids]], "num_tokens": 16, ...}   ->  {"ok": ..., ...} or {"error": text}

Runs inside the engine's environment, so it imports the standard library alone.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def serve(start: Callable[[dict[str, Any]], dict[str, Callable[..., Any]]]) -> None:
    """Start an engine from the options in argv[1] and answer until stdin ends or "quit".

    What the engine prints goes to stderr: stdout is for answers alone.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    verbs = start(json.loads(sys.argv[1]))
    print(json.dumps({"ok": "started"}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        if verb == "quit":
            break
        try:
            answer = {"ok": verbs[verb](**request)}
        except Exception:  # noqa: BLE001 - the test decides what an error means
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)
