"""Two independent engines share a node's cache: python examples/flexkv_two_engines.py

Each engine attaches the radix-server by itself.  The second finds what the first stored, though the
first has left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from radixshmem import RadixServer, ServerConfig


def main() -> None:
    name = f"/flexkv-example-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as directory,
        # Usually an operator runs this part: radix-server --name /flexkv --data-bytes 64G
        RadixServer(ServerConfig(name=name, data_bytes=8 << 20, metrics_address="")),
    ):
        run_engine(name, f"ipc://{directory}/first", 0, 1, 2)
        run_engine(name, f"ipc://{directory}/second", 2, 1, 3)


def run_engine(server_name: str, port: str, *prompts: int) -> None:
    """Run an engine until it has served prompts.  Independent engines have ports of their own."""
    environment = {"FLEXKV_RADIXSHMEM_SERVER_NAME": server_name, "FLEXKV_SERVER_RECV_PORT": port}
    engine = Path(__file__).with_name("flexkv_engine.py")
    command = [sys.executable, str(engine), "0", *map(str, prompts)]
    subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
