"""Messages and file descriptors over Unix stream sockets.

What goes over them:

    message   4-byte little-endian length, payload
    fds       batches of at most FDS_PER_BATCH, each with a byte of its own
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flexkv_radix.transfer.peers import check_owner, check_peer, close_in_children
from flexkv_radix.transfer.protocol import Message, decode, encode

FDS_PER_BATCH = 200  # the kernel refuses more than 253 in one message
MAX_MESSAGE_BYTES = 64 << 20  # an op of a million blocks is 12 MiB
MAX_BACKLOG_BYTES = MAX_MESSAGE_BYTES
_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 << 10
_LISTEN_TIMEOUT_S = 10.0
_LISTEN_RETRY_S = 1.0


class BacklogFull(RuntimeError):  # noqa: N818
    """The peer has not read for so long that no more is kept for it."""


class Channel:
    """One end of a connection.  Sending is the caller's to serialise, as is receiving.

    send() waits for a peer that does not read, post() does not; a channel uses one of them.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._backlog = bytearray()  # posted, not taken by the socket so far
        self.is_open = True  # False once the peer has closed its end

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Send message whole; OSError when the peer is gone."""
        payload = encode(message)
        self.sock.sendall(_LENGTH.pack(len(payload)) + payload)

    def post(self, message: Message) -> None:
        """Send message without waiting; flush() sends what the socket does not take now.

        BacklogFull, and nothing sent, when too much waits already; OSError when the peer is gone.
        """
        payload = encode(message)
        if len(self._backlog) + len(payload) > MAX_BACKLOG_BYTES:
            raise BacklogFull(f"{len(self._backlog) >> 20} MiB wait for a peer that does not read")
        self._backlog += _LENGTH.pack(len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Send as much of what was posted as goes without waiting; OSError when the peer is gone."""
        while self._backlog:
            try:
                num_sent = self.sock.send(self._backlog, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            del self._backlog[:num_sent]

    @property
    def has_backlog(self) -> bool:
        """Whether flush() has something to send."""
        return bool(self._backlog)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to read, or flush() can send more, or timeout_s have passed."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._backlog else 0))
        poller.poll(max(0.0, timeout_s) * 1000)

    def receive(self) -> Message | None:
        """The next message, waiting as long as the socket's timeout allows; None at the end.

        Reads no byte beyond it, so that file descriptors that follow are not lost.
        """
        while (message := self._next()) is None:
            if not self._read(self._missing_bytes()):
                return None
        return message

    def receive_available(self) -> list[Message]:
        """Messages that are there, without waiting; is_open turns False at the end."""
        while self._read(_READ_BYTES, socket.MSG_DONTWAIT):
            pass
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.is_open = False
        self.sock.close()

    def _read(self, max_bytes: int, flags: int = 0) -> bool:
        try:
            data = self.sock.recv(max_bytes, flags)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        self._buffer += data
        self.is_open = bool(data)
        return self.is_open

    def _missing_bytes(self) -> int:
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        (num_bytes,) = _LENGTH.unpack_from(self._buffer)
        return int(_LENGTH.size + num_bytes - len(self._buffer))

    def _next(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self._buffer)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {num_bytes} bytes is more than {MAX_MESSAGE_BYTES}")
        end = _LENGTH.size + num_bytes
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(payload)


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(file: HasFileno, timeout_s: float = 0.0) -> bool:
    """Whether file has something to read, or has ended, within timeout_s.

    select() takes no descriptor above 1023, and engines have more.  ValueError if file is closed.
    """
    poller = select.poll()
    poller.register(file.fileno(), select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def send_fds(sock: socket.socket, fds: Sequence[int], data: bytes = b"f") -> None:
    """Send fds in batches, each beside data."""
    for first in range(0, len(fds), FDS_PER_BATCH):
        packed = array.array("i", fds[first : first + FDS_PER_BATCH])
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])


def receive_fds(sock: socket.socket, num_fds: int, num_data_bytes: int = 1) -> list[int]:
    """Receive num_fds sent by send_fds beside data of num_data_bytes; the caller owns them.

    ConnectionError if the peer ends early or sends none.
    """
    fds: list[int] = []
    try:
        while len(fds) < num_fds:
            fds += _receive_batch(sock, num_fds - len(fds), num_data_bytes)
    except BaseException:
        close_fds(fds)
        raise
    return fds


def _receive_batch(sock: socket.socket, num_fds: int, num_data_bytes: int) -> list[int]:
    batch = array.array("i")
    space = socket.CMSG_LEN(num_fds * batch.itemsize)
    data, ancillary, flags, _ = sock.recvmsg(num_data_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            batch.frombytes(payload[: len(payload) - len(payload) % batch.itemsize])
    if len(data) != num_data_bytes or not batch or flags & socket.MSG_CTRUNC:
        close_fds(batch)
        raise ConnectionError(f"file descriptors: {len(batch)} of {num_fds} arrived")
    return batch.tolist()


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def socket_path(endpoint: str) -> str:
    """File of a Unix socket endpoint, given as a path or as ipc://path."""
    path = endpoint.removeprefix("ipc://")
    if not path or "://" in path:
        raise ValueError(
            f"endpoint {endpoint!r}: a Unix socket is needed (ipc://<path>), for it carries file descriptors"
        )
    return path


def listen(
    endpoint: str, stop: threading.Event | None = None, rival: Callable[[], str] = str
) -> socket.socket:
    """Listen on endpoint, for this user only; a socket file that nobody serves any more is replaced.

    Waits, unless stop is set, for a killed worker's socket to close, which it does after the memory that
    it pinned.  RuntimeError at once if rival() names somebody who lives and uses the endpoint.
    """
    path = socket_path(endpoint)
    deadline_s, stop = time.monotonic() + _LISTEN_TIMEOUT_S, stop or threading.Event()
    while _is_served(path):
        if error := rival():
            raise RuntimeError(error)
        if time.monotonic() > deadline_s or stop.wait(_LISTEN_RETRY_S):
            raise RuntimeError(f"{path}: another transfer worker listens here; give each engine its own path")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise RuntimeError(f"{path}: cannot listen: {error}") from error
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a stopped worker accepts nobody, and its queue may be full
        return probe.connect_ex(path) in (0, errno.EAGAIN)


def connect(endpoint: str, timeout_s: float) -> socket.socket:
    """Connect to endpoint, retrying while nobody listens yet.  TimeoutError names the path.

    StrangerError if another user listens there.
    """
    path = socket_path(endpoint)
    deadline_s = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)  # a stopped worker accepts nobody, and its queue may be full
            sock.connect(path)
            check_peer(sock, path)
            sock.setblocking(True)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            sock.close()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no transfer worker listens on {path} after {timeout_s} s") from error
            time.sleep(0.02)
        except PermissionError:
            sock.close()
            check_owner(path)
            raise
        except BaseException:
            sock.close()
            raise
        else:
            return close_in_children(sock)
