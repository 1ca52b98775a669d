"""What README and docs promise, tried."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from daemon import Daemon, ctl
from regions import leftovers

from radixshmem import Geometry, RadixClient

ROOT = Path(__file__).parents[2]


def test_readme_example_runs_twice(shm_name: str, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert '"/flexkv"' in example
    script = tmp_path / "example.py"
    script.write_text(example.replace("/flexkv", shm_name) + "print(hit.full_hit)\nclient.close()\n")
    with Daemon(shm_name, "--data-bytes", "1M") as daemon:
        daemon.wait_log("Waiting for a client's geometry")
        for hit in ("0\n", "3\n"):
            done = subprocess.run(
                [sys.executable, "-W", "error", script],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.stdout, done.stderr) == (hit, "")


def test_operators_commands_work(shm_name: str) -> None:
    """Every radixctl line of the page; what is removed at the end is a dead server's."""
    text = (ROOT / "docs" / "operations.md").read_text().replace("/flexkv", shm_name).replace("64G", "1M")
    lines = re.findall(r"^radixctl .*", text, re.MULTILINE)
    inline = re.findall(rf"`(radixctl --name {shm_name} [^`]*)`", text)
    assert (len(lines) > 5, [line.split()[-1] for line in inline]) == (True, ["reset", "rm"])
    with Daemon(shm_name, "--data-bytes", "1M") as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, Geometry(block_size=16, full_slot_bytes=32768)) as client:
            client.wait_ready(30)
            for line in [*lines, *inline[:-1]]:
                words = shlex.split(line, comments=True)[1:]
                done = ctl(*words, *(["--count", "1", "--interval", "0.05"] if "top" in words else []))
                assert (done.returncode, done.stderr) == (0, ""), line
        daemon.kill()
    assert ctl(*shlex.split(inline[-1])[1:]).returncode == 0
    assert leftovers(shm_name) == []


def test_architecture_names_every_file() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    files = [
        path
        for folder in ("csrc", "radixshmem", "flexkv_radix")
        for path in (ROOT / folder).rglob("*.[cp]*")
        if path.suffix in {".c", ".py"} and path.name not in {"__init__.py", "_radixshm.c", "_copy.c"}
        if not {"aliases", "tests"} & set(path.parts) and "_pb2" not in path.name
    ]
    assert len(files) > 100
    missing = [str(path.relative_to(ROOT)) for path in files if f"{path.name}`" not in text]
    assert missing == []
