"""radix-server and radixctl as the processes that operators run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from radixshmem import ServerInfo
from radixshmem.control import ControlClient
from radixshmem.names import default_endpoint

DEADLINE_S = 30.0
_T = TypeVar("_T")


def eventually(
    condition: Callable[[], _T], what: str | Callable[[], str] = "", timeout_s: float = DEADLINE_S
) -> _T:
    """The first true value of ``condition``; fails with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            text = what() if callable(what) else what or condition
            raise AssertionError(f"not within {timeout_s:g} s: {text}")
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    """A radix-server process; killed when the ``with`` block ends, if it still runs.

    It has no HTTP endpoint unless ``metrics`` gives an address; None leaves the server its default.
    """

    def __init__(
        self, name: str, *flags: str, metrics: str | None = "", env: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile(prefix="radix-server-")  # noqa: SIM115 - closed by __exit__
        address = [] if metrics is None else ["--metrics-address", metrics]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "radixshmem.cli", "--name", name, *address, *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment(env),
        )

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return Path(self._log.name).read_text()

    def wait_log(self, text: str) -> None:
        """Until ``text`` was printed."""

        def printed() -> bool:
            assert self.process.poll() is None or text in self.log, f"it ended before {text!r}: {self.log}"
            return text in self.log

        eventually(printed, lambda: f"{text!r} in {self.log}")

    def wait_serving(self) -> Daemon:
        """Until clients can bring their geometry, or be served."""
        self.wait_mode("waiting", "ready")
        return self

    def wait_mode(self, *modes: str) -> ServerInfo:
        """Until the server says that it is in one of ``modes``."""

        def reached() -> ServerInfo | None:
            assert self.process.poll() is None, f"it ended: {self.log}"
            if not Path(f"/dev/shm{self.name}.sock").exists():
                return None
            info = self.status()
            return info if info is not None and info.mode in modes else None

        return eventually(reached, lambda: f"mode {modes} of {self.log}")

    def status(self) -> ServerInfo | None:
        """Its answer to Status; None when it does not answer."""
        client = ControlClient(default_endpoint(self.name))
        try:
            return client.status()
        except (RuntimeError, TimeoutError):
            return None
        finally:
            client.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.wait_exit()

    def wait_exit(self) -> int:
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of a server, and wide enough not to fold lines."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RADIX_")}
    return {**kept, "COLUMNS": "200", **(more or {})}


def run_server(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """radix-server with ``flags`` that make it end by itself."""
    return _run("radixshmem.cli", *flags, env=env)


def ctl(*args: str) -> subprocess.CompletedProcess[str]:
    """radixctl with ``args``."""
    return _run("radixshmem.cli.ctl", *args)


def ctl_json(*args: str) -> Any:
    """The JSON answer of a radixctl command that must succeed."""
    result = ctl(*args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def _run(module: str, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(env),
        check=False,
    )
