"""The command lines of docs/engines.md, and a shell that runs them in an engine's environment.

Changed are only what other programs of this machine may use too: ports, the radix-server's name, its size.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from real_engines import DYNAMO, ENGINES_DIR, free_port, python_of, wait_until
from regions import remove_leftovers, unique_name

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/engines.md").read_text()
QUESTION_TOKENS = 1500  # of examples/vllm_two_engines/ask.py
TIMEOUT_S = 600


def command_lines(start: str) -> list[str]:
    """Commands of the page that start so, those of several lines joined."""
    blocks = "".join(re.findall(r"^```\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE))
    lines = [line for line in blocks.replace("\\\n", "").splitlines() if line.startswith(start)]
    lines += re.findall(rf"`({start}[^`]*)`", DOCS)
    assert lines, f"docs/engines.md has no line {start}..."
    return lines


class Shell:
    """Runs command lines; what it started ends with it."""

    def __init__(self, directory: Path, engine: str) -> None:
        self.name = unique_name()
        self.indexer_port = free_port()
        self._changes = {
            "/flexkv": self.name,
            "64G": "256M",
            "5557": str(free_port()),
            "5558": str(free_port()),
            "8090": str(self.indexer_port),
            "~/.cache/radixshmem-engines": str(ENGINES_DIR),
            "/tmp/tiny_llama": str(directory / "model"),
            "python -m dynamo": f"{python_of(DYNAMO)} -m dynamo",  # in an environment of its own
        }
        self.environment = os.environ | {"PATH": f"{python_of(engine).parent}:{os.environ['PATH']}"}
        self._directory = directory
        for name in ("examples", "tests"):  # but not the package: the one that is installed is used
            (directory / name).symlink_to(ROOT / name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._background: list[subprocess.Popen[bytes]] = []

    def changed(self, line: str) -> str:
        for old, new in self._changes.items():
            line = line.replace(old, new)
        return line

    def run(self, line: str, **variables: object) -> str:
        """What the line prints, once it has ended well."""
        process, log = self._start(line, {name: str(value) for name, value in variables.items()})
        wait_until(lambda: process.poll() is not None or self._has_lost_one(), f"{line} ends", TIMEOUT_S)
        assert process.poll() == 0, self.logs()
        return log.read_text()

    def export(self, line: str) -> None:
        """Keep the variable that the line sets, as the reader's shell would."""
        name = re.sub(r"(export )?(\w+)=.*", r"\2", line)
        self.environment[name] = self.run(f'{line}\nprintf %s "${name}"')

    def start(self, line: str) -> None:
        """Run the line in the background, until the end of the test."""
        self._background.append(self._start(line, {})[0])

    def _has_lost_one(self) -> bool:
        """Whether something that runs in the background ended."""
        return any(process.poll() is not None for process in self._background)

    def _start(self, line: str, variables: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._directory / f"{len(self._processes)}.log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                ["bash", "-c", self.changed(line)],
                cwd=self._directory,
                env=self.environment | variables,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process, log

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self._directory.glob("*.log")
        )

    def close(self) -> None:
        for process in reversed(self._processes):
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(60)
        remove_leftovers(self.name)


@contextlib.contextmanager
def open_shell(directory: Path, engine: str) -> Iterator[Shell]:
    """A shell in which the lines before the engines' were run."""
    shell = Shell(directory, engine)
    try:
        for line in [*command_lines("MODEL="), *command_lines("export ")]:
            shell.export(line)
        yield shell
    finally:
        shell.close()


def first_words(output: str) -> list[int]:
    """Cached tokens of each server, of what ask.py prints."""
    assert "answers are equal" in output
    return [int(tokens) for tokens in re.findall(r"^http.* ms +(\d+)$", output, re.MULTILINE)]
