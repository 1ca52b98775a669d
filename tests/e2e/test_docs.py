"""What README and docs promise, tried."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from daemon import Daemon

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
