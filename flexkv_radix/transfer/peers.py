"""Who is at the other end of a Unix socket, and whether that process still lives.

The end of a connection tells of the end of a process only if no other has a copy of its socket.  A
process that was forked from it has one: so that process closes it (close_in_children), and the peer
watches the process too (Peer), for not every fork goes through the interpreter.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from collections.abc import Sequence
from io import FileIO

from radixshmem import RadixError

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5
_kept_from_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class StrangerError(RadixError):
    """The other end of a socket is of another user."""


def check_peer(sock: socket.socket, path: str) -> None:
    """StrangerError unless the process connected by sock, over path, is this user's or root's.

    To be called before anything is sent.  Of a listener that is the user who made it listen.
    """
    _, uid = _credentials(sock)
    if uid not in (os.geteuid(), 0):
        raise StrangerError(
            f"{path}: a process of user id {uid} is at the other end, this one is of user id {os.geteuid()}: "
            "choose a path where only this user may create files"
        )


def peer_pid(sock: socket.socket) -> int:
    """The process that connected sock; 0 if it cannot be seen from here (it is in another container)."""
    pid, _ = _credentials(sock)
    return pid


def check_owner(path: str) -> None:
    """StrangerError unless the file at path is this user's or root's; OSError if there is none."""
    uid = os.lstat(path).st_uid
    if uid not in (os.geteuid(), 0):
        raise StrangerError(
            f"{path} belongs to user id {uid}, this process to user id {os.geteuid()}: choose a path where "
            "only this user may create files"
        )


class Peer:
    """The process at the other end of a connected socket.  Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._process = _process_of(sock)  # None: unknown, it may be in another container

    @property
    def files(self) -> Sequence[int]:
        """Descriptors to poll for input: any of them may tell of the peer's end."""
        return [self.sock.fileno(), *([] if self._process is None else [self._process.fileno()])]

    def has_ended(self) -> bool:
        """Whether the process itself is gone, whoever holds a copy of its socket."""
        return self._process is not None and _is_readable(self._process.fileno())

    def close(self) -> None:
        """A second call does nothing."""
        self.sock.close()
        if self._process is not None:
            self._process.close()


def _process_of(sock: socket.socket) -> FileIO | None:
    try:
        return FileIO(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:  # an older kernel, where a process of another pid namespace has the number 0
        pid, _ = _credentials(sock)
    try:
        return FileIO(os.pidfd_open(pid)) if pid > 0 else None
    except OSError:
        return None


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """(process id, 0 if it has none here; user id)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def close_in_children(sock: socket.socket) -> socket.socket:
    """Have sock closed in processes that are forked from this one; returns it."""
    _kept_from_children.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_kept_from_children):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)
