"""Clients in processes of their own, in pid namespaces of their own if wanted, to be stopped and killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from daemon import eventually

_MAIN = Path(__file__).with_name("living_main.py")


class Living:
    """living_main.py on the index ``name``; killed when the ``with`` block ends.

    ``namespace``: a command and its flags to start it under, such as ``unshare --pid --fork``.
    """

    def __init__(self, name: str, *namespace: str) -> None:
        self._process = subprocess.Popen(
            [*namespace, sys.executable, "-W", "error", str(_MAIN), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.entry: dict[str, int] = self.call("attach")
        self.pid = _only_child(self._process.pid) if namespace else self._process.pid

    @property
    def slot(self) -> int:
        return self.entry["slot"]

    def call(self, method: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((method, args), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """SIGSTOP, and wait until no thread runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: set(_thread_states(self.pid)) == {"T"}, "stopped")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Living:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return "Z" not in _thread_states(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _only_child(pid: int) -> int:
    def child() -> str:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text()

    return int(eventually(child, "forked"))


def _thread_states(pid: int) -> list[str]:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [stat.rpartition(") ")[2][0] for stat in stats]
