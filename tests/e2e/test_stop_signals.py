"""A stop signal ends radix-server and radixctl quietly, however early it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import DEADLINE_S, Daemon, environment
from paths import path_of
from regions import leftovers

from radixshmem import Geometry, RadixClient

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
GEOMETRY = Geometry(block_size=16, full_slot_bytes=32768)


def interrupted(
    number: signal.Signals, *command: str, env: dict[str, str] | None = None
) -> tuple[int, list[str], str]:
    """(exit code, further lines, errors) of a command that gets the signal at its first line."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment({**(env or {}), "PYTHONUNBUFFERED": "1"}),
    )
    assert process.stdout is not None
    assert process.stdout.readline(), process.communicate()[1]
    process.send_signal(number)
    out, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out.splitlines(), errors


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("radixshmem.cli", "rich_click"),
        ("radixshmem.cli", "grpc"),
        ("radixshmem.cli.ctl", "rich_click"),
        ("radixshmem.cli.ctl", "numpy"),
    ],
)
def test_during_imports(
    module: str, imported: str, number: signal.Signals, shm_name: str, tmp_path: Path
) -> None:
    """The import of a dependency takes as long as the signal does."""
    slow = "import signal\nprint('importing', flush=True)\nsignal.pause()\n"
    (tmp_path / f"{imported}.py").write_text(slow)
    command = (module, "--name", shm_name, *(["status"] if module.endswith("ctl") else []))
    ended = interrupted(number, *command, env={"PYTHONPATH": str(tmp_path)})
    assert ended == (128 + number, [], "")
    assert leftovers(shm_name) == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_radixctl_at_work(number: signal.Signals, shm_name: str) -> None:
    """It detaches: no entry of its own is left for others to reap."""
    with Daemon(shm_name, "--data-bytes", "1M") as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(30)
            client.insert(path_of(1), client.allocate_slots(1))
            command = ("radixshmem.cli.ctl", "--name", shm_name, "--json", "events", "--follow")
            assert interrupted(number, *command) == (128 + number, [], "")
            assert client.stats()["reaped_clients"] == 0
            assert client.stats()["num_clients"] == 2
