"""How an engine knows that no transfer worker touches its memory any more, where it is not their parent.

The engine keeps one end of a socket pair; its KVServer has the other, and so has each of its workers:

    worker -> engine   a byte, and a descriptor of its process (pidfd)
    its end            no worker is to come: the server and all workers have let go of it

The end of a connection alone does not tell.  A dying process releases its files one by one, and a device
goes on copying until its driver's are released, on an H200 some 0.1 s later; a pidfd waits for all of that.
"""

from __future__ import annotations

import contextlib
import os
import socket
from io import FileIO

from flexkv_radix.transfer.wire import receive_fds, send_fds, wait_readable


class Lifeline:
    """The engine's end.  Not for two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._workers: list[FileIO] = []
        self._has_ended = False

    def is_over(self) -> bool:
        """Whether all workers have ended and none can come."""
        while not self._has_ended:
            try:
                self._workers += map(FileIO, receive_fds(self._sock, 1))
            except BlockingIOError:
                return False
            except ConnectionError:
                self._has_ended = True
        return all(wait_readable(worker) for worker in self._workers)

    def close(self) -> None:
        """Watch no more.  A second call does nothing."""
        self._sock.close()
        while self._workers:
            self._workers.pop().close()


def show_end(lifeline_fd: int) -> None:
    """Let the engine know of the end of this process, a worker.  lifeline_fd stays open until then."""
    sock = socket.socket(fileno=lifeline_fd)
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # no pidfds before Linux 5.3; or the engine is gone
        pidfd = os.pidfd_open(os.getpid())
        send_fds(sock, [pidfd])
        os.close(pidfd)
    sock.detach()  # it ends with the process
