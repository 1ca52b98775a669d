"""The control socket in the file system."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time

import grpc

from radixshmem.errors import RadixError
from radixshmem.names import socket_path
from radixshmem.region import Access
from radixshmem.server.exits import NameInUse

_UNLINK_DEADLINE_S = 2.0
_umask_lock = threading.Lock()  # the umask belongs to the whole process


def bind_endpoint(server: grpc.Server, endpoint: str, access: Access) -> None:
    """Bind ``server`` to the socket of ``endpoint``, which only its owner can open until ``access`` is set.

    Assumes the name lock is held.  A stale socket of ours is replaced.  Raises NameInUse when another
    server listens there, RadixError when something else is there or the socket cannot be made.
    """
    path = socket_path(endpoint)
    _clear_stale(path)
    if not os.path.isdir(os.path.dirname(path)):
        raise RadixError(f"--endpoint: there is no directory {os.path.dirname(path)}")
    with _umask_lock:
        before = os.umask(0o177)
        try:
            server.add_insecure_port(endpoint)
        except RuntimeError as error:
            raise RadixError(f"--endpoint: {endpoint} cannot be bound: {error}") from error
        finally:
            os.umask(before)
    if access.gid is not None:
        os.chown(path, -1, access.gid)
    os.chmod(path, access.mode)


def release_endpoint(server: grpc.Server, endpoint: str, grace_s: float) -> None:
    """Stop ``server``, which is bound to ``endpoint``, and wait until its socket is gone.

    gRPC unlinks it; if that came after the name lock was let go, it could hit a successor's socket.
    """
    server.stop(grace_s).wait()
    path = socket_path(endpoint)
    deadline = time.monotonic() + _UNLINK_DEADLINE_S
    while os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(0.005)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _clear_stale(path: str) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise RadixError(
            f"--endpoint: {path} exists and is not a socket of user id {os.geteuid()}: remove it"
        )
    if _is_served(path):
        raise NameInUse(f"another server listens at {path}: choose another --endpoint")
    os.unlink(path)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
    return True
