"""Who serves an endpoint, and starting a KVServer that outlives the engine that starts it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from flexkv_radix.server.liveness import liveness_path


class EndpointLock:
    """Held by the one KVServer of an endpoint; the kernel drops it when that dies.

    The file stays: were it unlinked, two servers could hold locks on two files of its name.
    """

    def __init__(self, endpoint: str) -> None:
        """BlockingIOError if somebody else holds it."""
        self._file = open(lock_path(endpoint), "a", encoding="ascii")  # noqa: SIM115 - until close()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()


def lock_path(endpoint: str) -> str:
    return liveness_path(endpoint).removesuffix(".alive") + ".lock"


def is_served(endpoint: str) -> bool:
    """Whether a KVServer holds the endpoint."""
    try:
        EndpointLock(endpoint).close()
    except BlockingIOError:
        return True
    return False


def ensure_server(endpoint: str) -> None:
    """Start a KVServer for endpoint unless there is one.  Of several started at once, one stays.

    It is no child of the engine (it forks once more): it ends by itself some time after its last client.
    """
    if is_served(endpoint):
        return
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["PYTHONSAFEPATH"] = "1"  # not what lies where the engine was started (Python >= 3.11)
    command = [sys.executable, "-m", "flexkv_radix.server", "--endpoint", endpoint, "--background"]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False)
