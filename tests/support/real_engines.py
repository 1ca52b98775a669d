"""Engine processes and radix-servers for the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from regions import remove_leftovers

SCRIPTS = Path(__file__).parents[1] / "engines"
ENGINES_DIR = Path(os.environ.get("RADIX_ENGINES_DIR", Path.home() / ".cache/radixshmem-engines"))
START_TIMEOUT_S = 600.0  # 15 s on an idle machine
CALL_TIMEOUT_S = 300.0
MakeEngine = Callable[..., "EngineProcess"]
MakeServer = Callable[..., "RadixServer"]
Prompts = Callable[..., list[list[int]]]
VLLM, SGLANG_23, SGLANG_20, DYNAMO = "vllm-0.32.0", "sglang-0.5.23", "sglang-0.5.20", "dynamo-1.6.1"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "SGLANG_USE_CPU_ENGINE": "1",
}


def is_chosen(engine: str) -> bool:
    """Whether ENGINES, a list of names like "vllm sglang-0.5.23", includes this engine; unset, it has all."""
    names = os.environ.get("ENGINES", "").split()
    return not names or any(engine.startswith(name) for name in names)


def python_of(engine: str) -> Path:
    """Interpreter of an engine's environment."""
    return ENGINES_DIR / engine / "bin/python"


class EngineProcess:
    """One engine in a process of its own; its log is a file."""

    def __init__(
        self,
        engine: str,
        options: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
        script: str = "",
    ) -> None:
        self.log = log
        script = script or ("vllm_engine.py" if engine.startswith("vllm") else "sglang_engine.py")
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                [python_of(engine), SCRIPTS / script, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                cwd=log.parent,  # not the repository: the engine is to import what is installed
                start_new_session=True,
                text=True,
                bufsize=1,
            )
        self._started = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_start(self) -> EngineProcess:
        """Wait until it serves."""
        if not self._started:
            assert self._answer(START_TIMEOUT_S) == "started"
            self._started = True
        return self

    def processes(self, command: str) -> list[int]:
        """Ids of the processes of this engine whose command line contains command."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            pid = int(path.parent.name)
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.pid and command.encode() in path.read_bytes():
                    found.append(pid)
        return found

    def ask(self, verb: str, **arguments: Any) -> None:
        """Send a request; answer() reads what it says."""
        self.await_start()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")

    def answer(self) -> Any:
        return self._answer(CALL_TIMEOUT_S)

    def call(self, verb: str, **arguments: Any) -> Any:
        self.ask(verb, **arguments)
        return self.answer()

    def generate(self, *prompts: list[int], **arguments: Any) -> list[dict[str, Any]]:
        """Outputs of the prompts: tokens, num_cached."""
        outputs: list[dict[str, Any]] = self.call("generate", prompts=list(prompts), **arguments)
        return outputs

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"no answer in {timeout_s} s\n{self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}\n{self._tail()}")
        return answer["ok"]

    def _tail(self, num_chars: int = 6000) -> str:
        return self.log.read_text()[-num_chars:]

    def kill(self) -> None:
        """SIGKILL the engine and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def close(self) -> None:
        """Let it end by itself, then make sure."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()


class RadixServer:
    """A radix-server of its own name."""

    def __init__(self, log: Path, data_bytes: str, *flags: str) -> None:
        self.name = f"/t_engines_{os.getpid()}_{log.stem}"
        self._command = [
            sys.executable, "-m", "radixshmem.cli", "--name", self.name, "--data-bytes", data_bytes,
            "--metrics-address", "", *flags,
        ]  # fmt: skip
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log_file:
            self._process = subprocess.Popen(self._command, stdout=log_file, stderr=log_file)
        wait_until(lambda: self._listens() or self._has_ended(), "the radix-server listens")
        assert not self._has_ended(), self.log.read_text()

    def _listens(self) -> bool:
        """Whether somebody answers at the socket; the file of a killed server is still there."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(f"/dev/shm{self.name}.sock") == 0

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL; the regions stay."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Clean stop, which removes the regions; those that a killed server left go as well."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)
        remove_leftovers(self.name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until is_true(); TimeoutError says what was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not after {timeout_s} s")
        time.sleep(0.05)


@contextlib.contextmanager
def closing_all() -> Iterator[list[Any]]:
    """A list whose members are closed at the end, all at once: an engine takes seconds."""
    members: list[Any] = []
    try:
        yield members
    finally:
        with ThreadPoolExecutor(len(members) or 1) as threads:
            for closing in [threads.submit(member.close) for member in members]:
                closing.result()
