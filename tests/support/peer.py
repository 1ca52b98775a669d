"""Another engine: a client in a process of its own, driven from a test."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from radixshmem import Geometry

_MAIN = Path(__file__).with_name("peer_main.py")


class Peer:
    """Calls are made in the other process, one at a time; what they raise there is raised here."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(_MAIN), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, geometry: Geometry | None = None) -> Any:
        """Make the client and wait until the server is ready; returns the published geometry."""
        return self.call("join", geometry)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """A method of the client, or of ``peer_main.Peer``."""
        self.send(method, *args, **options)
        return self.receive()

    def send(self, method: str, *args: Any, **options: Any) -> None:
        """Begin a call; ``receive`` returns its answer."""
        assert self._process.stdin is not None
        pickle.dump((method, args, options), self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self._process.kill()
        self._reap()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.call("close")
        self._reap()

    def _reap(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(30)
