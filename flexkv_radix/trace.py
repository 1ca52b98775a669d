"""The tracing switch: with FLEXKV_ENABLE_TRACE=1 every call of a backend is a line of JSON.

    {"unix_s": ..., "call": "get_match", "us": 23.1, "args": [...], "result": [7, 96]}

Tokens and hashes are not written, only how many there were.  A file that cannot be written costs one
warning and the trace, never a call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from flexkv_radix.launching import Launch
from flexkv_radix.planner import Blocks
from flexkv_radix.table import Answer

logger = logging.getLogger(__name__)

_CALLS = frozenset(
    ("start", "shutdown", "get_match", "put_match", "prefetch", "launch", "wait", "cancel", "cancel_all")
)


class TracedBackend:
    """A backend whose calls are written to a file; everything else it passes on."""

    def __init__(self, backend: Any, path: str) -> None:
        self._backend = backend
        self._writer = LineWriter(path)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        return partial(self._call, name, value) if name in _CALLS else value

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        line = {"unix_s": time.time(), "call": name, "args": args, **kwargs}
        start_ns = time.monotonic_ns()
        try:
            line["result"] = result = function(*args, **kwargs)
        except BaseException as error:
            line["error"] = repr(error)
            raise
        finally:
            line["us"] = (time.monotonic_ns() - start_ns) / 1000
            self._writer.write(json.dumps(line, default=_summary))
            if name == "shutdown":
                self._writer.close()
        return result


def _summary(value: Any) -> Any:
    """What a trace says of an object that JSON does not know: sizes, not contents."""
    match value:
        case np.ndarray() | Blocks():
            return len(value)
        case Launch(task_id=task_id, gpu_blocks=gpu_blocks):
            return {"task_id": task_id, "num_blocks": len(gpu_blocks)}
        case Answer(status=status, error=error):
            return {"status": status, "error": error}
        case Enum():
            return value.value
    return repr(value)


class LineWriter:
    """Appends lines to a file, until it cannot; then it says so once and drops them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        try:
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until close()
        except OSError as error:
            self._give_up(error)

    def write(self, line: str) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(line + "\n")
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _give_up(self, error: OSError) -> None:
        logger.warning("no trace: cannot write %s (FLEXKV_TRACE_FILE_PATH): %s", self._path, error)
        self._file = None
