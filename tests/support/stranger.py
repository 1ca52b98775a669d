"""Another user of the machine: python stranger.py listen|connect|lock <path>, as root; runs as nobody.

Prints "ready", and then for each connection how many bytes and descriptors came over it.  Ends with stdin.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UID = 65534


@contextmanager
def stranger(does: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """The process, once it is ready."""
    process = subprocess.Popen(
        [sys.executable, __file__, does, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _listen(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    print("ready", flush=True)


def _serve(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        _tell(sock)


def _tell(sock: socket.socket) -> None:
    num_bytes = num_fds = 0
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 200)
        num_bytes, num_fds = num_bytes + len(data), num_fds + len(fds)
        if not data:
            break
    print(num_bytes, num_fds, flush=True)


def _connect(path: str) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    print("ready", flush=True)
    threading.Thread(target=_tell, args=(sock,), daemon=True).start()


def _lock(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX)
    print("ready", flush=True)


def main() -> None:
    os.setgid(UID)
    os.setuid(UID)
    {"listen": _listen, "connect": _connect, "lock": _lock}[sys.argv[1]](sys.argv[2])
    sys.stdin.read()


if __name__ == "__main__":
    main()
