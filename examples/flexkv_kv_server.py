"""Two engine instances go through one KVServer: python examples/flexkv_kv_server.py

The first engine starts the server, which serves both and ends some seconds after the last has left.
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
        for instance in range(2):  # the second loads what the first stored
            run_instance(name, f"ipc://{directory}/flexkv", instance)


def run_instance(server_name: str, port: str, instance: int) -> None:
    """Run an engine instance until it has served the same three prompts as the other."""
    environment = {
        "FLEXKV_RADIXSHMEM_SERVER_NAME": server_name,
        "FLEXKV_SERVER_RECV_PORT": port,
        "FLEXKV_SERVER_LAUNCH_MODE": "embedded",
        "FLEXKV_INSTANCE_NUM": "2",
        "FLEXKV_INSTANCE_ID": str(instance),
    }
    engine = Path(__file__).with_name("flexkv_engine.py")
    command = [sys.executable, str(engine), "0", "1", "2", "3"]
    subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
