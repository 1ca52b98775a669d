"""Whose shared-memory objects and sockets this process accepts."""

from __future__ import annotations

import os
import stat

from radixshmem.errors import RadixError


def trusted_uids() -> set[int]:
    """Owners whose regions and sockets a client accepts: itself, root, ``RADIX_SERVER_UID``."""
    uids = {os.geteuid(), 0}
    given = os.environ.get("RADIX_SERVER_UID", "")
    if given and not given.isdecimal():
        raise ValueError(f"RADIX_SERVER_UID: {given!r} is not a numeric user id")
    return uids | {int(given)} if given else uids


def check_region_owner(fd: int, what: str, *, own: bool = False) -> None:
    """Refuse the file open as ``fd`` unless it is a regular file of a trusted owner.

    ``own`` narrows that to this process's effective user.  Raises RadixError.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RadixError(f"{what} is not a regular file: remove it, or choose another name")
    _check_uid(status.st_uid, what, own)


def check_socket_owner(path: str) -> None:
    """Refuse the file at ``path`` unless it is a socket, not a link to one, of a trusted owner.

    A path where nothing is passes: connecting will say so.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise RadixError(f"{path} is not a socket")
    _check_uid(status.st_uid, path, own=False)


def _check_uid(uid: int, what: str, own: bool) -> None:
    if own and uid != os.geteuid():
        raise RadixError(
            f"{what} belongs to user id {uid}, not to this process's {os.geteuid()}: remove it, or choose "
            "another name"
        )
    if uid not in trusted_uids():
        raise RadixError(
            f"{what} belongs to user id {uid}; set RADIX_SERVER_UID={uid} if its server runs as that user"
        )
