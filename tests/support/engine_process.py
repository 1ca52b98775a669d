"""Engines as processes that a test can drive, kill and stop."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_MAIN = Path(__file__).with_name("engine_main.py")
_ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """engine_main.py; killed at the end of the `with` block if it still runs."""

    def __init__(
        self, server_name: str, directory: Path, dp_client_id: int = 0, *, identity: str = "", **environ: str
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                str(_MAIN),
                server_name,
                str(directory),
                str(dp_client_id),
                identity,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{_ROOT}:{_MAIN.parent}", **environ},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, verb: str, *arguments: Any) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *(_plain(argument) for argument in arguments)]) + "\n")
        self.process.stdin.flush()

    def ask(self, verb: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """The answer; fails if the process ends or does not answer in time."""
        self.send(verb, *arguments)
        return self.answer(verb, timeout_s)

    def answer(self, what: str, timeout_s: float = 60.0) -> Any:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert readable, f"no answer to {what} within {timeout_s} s"
        line = self.process.stdout.readline()
        assert line, f"the engine ended during {what}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self.process.stdout.close()
        assert kind is not None or status in (0, -9), f"the engine ended with status {status}"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
