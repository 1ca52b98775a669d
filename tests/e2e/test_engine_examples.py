"""The engines' examples, several runs at once, with real radix-servers and programs that wait for engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from daemon import DEADLINE_S, environment, eventually
from regions import leftovers

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("vllm_two_engines/run.sh", "sglang/run.sh", "dynamo/run.sh")
ENGINE = "#!/bin/sh\nexec sleep 600\n"
# Who asks the engines does so once there is a server, and until the test lets it end.
PYTHON = """#!/bin/sh
case "$1" in -m) exec sleep 600;; esac
name=$FLEXKV_RADIXSHMEM_SERVER_NAME
until radixctl --name "$name" status; do :; done 2>/dev/null
echo "$name" >"$DONE.part" && mv "$DONE.part" "$DONE.name"
read -r line <"$DONE"
"""


class Run:
    """An example, until it is told to end; killed with all that it started when the ``with`` block ends."""

    def __init__(self, script: str, folder: Path, variables: dict[str, str]) -> None:
        folder.mkdir()
        self._done = folder / "done"
        os.mkfifo(self._done)
        path = f"{folder.parent}:{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
        self._process = subprocess.Popen(
            ["bash", EXAMPLES / script, "a-model"],
            env=environment({"PATH": path, "DONE": str(self._done), "DATA_BYTES": "1M", **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

    def server_name(self) -> str:
        """Of the server that the example started, once it answers."""
        name = self._done.with_suffix(".name")
        eventually(name.exists, "the example's server answers")
        return name.read_text().strip()

    def finish(self) -> tuple[int, str]:
        """(exit code, output)"""
        self._done.write_text("go on\n")
        output = self._process.communicate(timeout=DEADLINE_S)[0]
        return self._process.returncode, output

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_runs_at_once_have_servers_of_their_own(script: str, tmp_path: Path, shm_name: str) -> None:
    for name, text in (("vllm", ENGINE), ("python3", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    chosen: list[dict[str, str]] = [{}, {}, {"SERVER_NAME": shm_name}]
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(script, tmp_path / str(i), env)) for i, env in enumerate(chosen)]
        names = [run.server_name() for run in runs]
        assert len(set(names)) == 3
        assert names[2] == shm_name
        for run, name in zip(runs, names, strict=True):
            code, output = run.finish()
            assert code == 0, output
            assert leftovers(name) == []
