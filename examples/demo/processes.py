"""The demo's processes: started here, and always ended here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from examples.demo.engine import Answer, Request

STOP_DEADLINE_S = 15.0
START_DEADLINE_S = 20.0


class DemoError(RuntimeError):
    """A process of the demo did not do its part."""


class Server:
    """A radix-server process, as an operator starts it."""

    def __init__(self, name: str, data_bytes: str, log: Path) -> None:
        self.name = name
        self.metrics_url = f"http://127.0.0.1:{_free_port()}/metrics"
        self.command = [
            _console_script("radix-server"),
            *("--name", name),
            *("--data-bytes", data_bytes),
            *("--metrics-address", self.metrics_url.split("/")[2]),
        ]
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def wait_listening(self) -> None:
        """Until clients can connect; DemoError with the server's log when that never comes."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not shm_path(self.name + ".sock").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"radix-server did not start (exit code {self.process.poll()}):\n{self.log}")
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        return self._log.read_text(errors="replace")

    def ctl(self, command_name: str, width: int) -> str:
        """Output of a ``radixctl`` command, ``width`` columns wide; DemoError when it fails."""
        command = [_console_script("radixctl"), "--name", self.name, command_name]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=STOP_DEADLINE_S,
            check=False,
            env={**os.environ, "COLUMNS": str(width)},
        )
        if done.returncode:
            raise DemoError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def stop(self) -> None:
        """SIGTERM, which has the server remove its shared memory; SIGKILL if it does not end."""
        _end(self.process, ask=True)


class EngineProcess:
    """An engine in a process of its own, with its requests and answers on pipes."""

    def __init__(self, server: str, label: str) -> None:
        self.label = label
        command = [sys.executable, "-m", "examples.demo.engine", "--server", server, "--label", label]
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **one_thread},  # two engines on a small machine: no fights over cores
        )

    def wait_ready(self) -> None:
        """Until the engine is attached and warm."""
        self._read()

    def serve(self, request: Request) -> Answer:
        """Have the engine run ``request``."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # a dead engine; reading its answer tells how it ended
            self.process.stdin.write(json.dumps(asdict(request)) + "\n")
            self.process.stdin.flush()
        return Answer(**json.loads(self._read()))

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise DemoError(f"{self.label} ended with exit code {self.process.wait(STOP_DEADLINE_S)}")
        return line

    def stop(self) -> None:
        """Close its requests, which ends it; kill it if it does not end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead already
            self.process.stdin.close()
        _end(self.process, ask=False)
        self.process.stdout.close()


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn the signals that end a command into SystemExit, so that every ``finally`` runs."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shm_path(name: str) -> Path:
    """Where the shared-memory object ``name`` is seen."""
    return Path("/dev/shm") / name.lstrip("/")


def sweep(name: str) -> list[Path]:
    """Remove what the stopped server ``name`` left in shared memory; returns what that was."""
    paths = (shm_path(name + suffix) for suffix in ("", "_data", ".sock", ".lock"))
    left = [path for path in paths if path.exists()]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes], *, ask: bool) -> None:
    if ask and process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_DEADLINE_S)


def _console_script(name: str) -> str:
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise DemoError(f"{path} is not there: install the package with `pip install -e .` (or `make demo`)")
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
