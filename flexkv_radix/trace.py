"""The tracing switch: with FLEXKV_ENABLE_TRACE=1 every call of a KVManager is a line of JSON.

Tokens are not written, only how many there were.  A file that cannot be written costs one warning and
the trace, never a call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)


class Tracer:
    """Writes calls to a file; with path "" it does nothing."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        if path:
            try:
                self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until close()
            except OSError as error:
                self._give_up(error)

    @property
    def is_on(self) -> bool:
        return self._file is not None

    @contextmanager
    def call(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Trace the call inside; what it adds to the dict is written too, as is an exception."""
        if self._file is None:
            yield fields
            return
        start_ns = time.monotonic_ns()
        try:
            yield fields
        except BaseException as error:
            fields["error"] = repr(error)
            raise
        finally:
            line = {
                "unix_s": time.time(),
                "call": name,
                "us": (time.monotonic_ns() - start_ns) / 1000,
                **fields,
            }
            self._write(json.dumps(line, default=repr))

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, line: str) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(line + "\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("no trace: cannot write %s (FLEXKV_TRACE_FILE_PATH): %s", self._path, error)
        self._file = None
