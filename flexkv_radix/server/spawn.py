"""Who serves an endpoint, and starting a KVServer that outlives the engine that starts it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

from flexkv_radix.server.liveness import liveness_path
from flexkv_radix.transfer.peers import StrangerError


class EndpointLock:
    """Held by the one KVServer of an endpoint; the kernel drops it when that dies.

    The file stays: were it unlinked, two servers could hold locks on two files of its name.
    """

    def __init__(self, endpoint: str) -> None:
        """BlockingIOError if somebody else holds it, StrangerError if it is another user's."""
        self._file = _open_own(lock_path(endpoint))
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()


def _open_own(path: str) -> FileIO:
    """The file, made if there is none, which nobody else may open: who can may lock it."""
    try:
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except PermissionError:
        with contextlib.suppress(FileNotFoundError):  # the directory is not to be written to
            _check_own(os.lstat(path), path)
        raise
    try:
        _check_own(os.fstat(file.fileno()), path)
        os.fchmod(file.fileno(), 0o600)
    except BaseException:
        file.close()
        raise
    return file


def _check_own(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.geteuid():
        raise StrangerError(
            f"{path} belongs to user id {status.st_uid}, not to this process's {os.geteuid()}: remove it, or "
            "choose another FLEXKV_SERVER_RECV_PORT"
        )


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
