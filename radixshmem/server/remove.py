"""Remove what a dead server left."""

from __future__ import annotations

import os
import stat

from radixshmem.errors import RadixError
from radixshmem.names import default_data_name, default_endpoint, shm_path, socket_path
from radixshmem.region import destroy_store, object_path, recorded_store, retire_regions, store_refusal
from radixshmem.server.lock import NameLock


def remove_leftovers(name: str) -> list[str]:
    """Retire and unlink regions, socket and lock of the dead server ``name``; returns the paths that went.

    Raises NameInUse while the server lives, and then changes nothing.
    """
    socket = socket_path(default_endpoint(name))
    lock = NameLock(name)
    try:
        data_name, hugepage_path = recorded_store(name) or (default_data_name(name), "")
        if data_name and store_refusal(name, data_name, hugepage_path):
            data_name = ""  # not ours
        paths = [shm_path(name), socket]
        if data_name:
            paths.insert(1, object_path(data_name, hugepage_path))
        present = [path for path in paths if os.path.lexists(path)]
        retire_regions(name)
        if data_name:
            destroy_store(data_name, hugepage_path)
        _unlink_socket(socket)
    except BaseException:
        lock.release()
        raise
    lock.remove()
    return present


def _unlink_socket(path: str) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise RadixError(f"{path} is not a socket of user id {os.geteuid()}: left alone")
    os.unlink(path)
