"""Knowing that the other side is gone.  ZeroMQ has no sign for it, a connected Unix socket does.

    client -> server   length, Hello; one end of a socket pair (SCM_RIGHTS), the lifeline
    server -> client   length, Welcome

After that nothing is sent; the end of the connection is the news.  It comes a moment before the end of
the server's transfer workers, which may still write to the client's memory: of that the lifeline tells
(transfer/lifeline.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import msgspec

from flexkv_radix.server.messages import Hello, Welcome, decode_greeting, encode
from flexkv_radix.transfer.lifeline import Lifeline
from flexkv_radix.transfer.peers import check_owner, check_peer, close_in_children
from flexkv_radix.transfer.reception import Arrival
from flexkv_radix.transfer.wire import send_fds, wait_readable

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20


def liveness_path(endpoint: str) -> str:
    """Unix socket beside the server's endpoint; ValueError unless that is ipc://<absolute path>."""
    path = endpoint.removeprefix("ipc://")
    if not endpoint.startswith("ipc:///"):
        raise ValueError(
            f"server_recv_port: {endpoint!r} is not ipc:///<path> (FLEXKV_SERVER_RECV_PORT): the KVServer "
            "serves one node"
        )
    return f"{path}.alive"


def listen(endpoint: str) -> socket.socket:
    """Listen beside endpoint, for this user only.  The caller holds the lock of the endpoint."""
    path = liveness_path(endpoint)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def send(sock: socket.socket, message: Hello | Welcome) -> None:
    """Send a greeting; OSError when the other side is gone."""
    payload = encode(message)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(sock: socket.socket) -> Hello | Welcome:
    """Receive a greeting; ConnectionError when the other side ends or sends too much."""
    (num_bytes,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    if num_bytes > _MAX_BYTES:
        raise ConnectionError(f"a greeting of {num_bytes} bytes")
    return decode_greeting(_receive_exactly(sock, num_bytes))


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        if not (more := sock.recv(num_bytes - len(data))):
            raise ConnectionError("the other side ended the connection")
        data += more
    return data


def read_hello(arrival: Arrival) -> tuple[Hello, int] | None:
    """A client's introduction, and its lifeline, which the caller closes; None until they are there.

    ConnectionError, ValueError or MsgspecError if it is none.
    """
    payload = arrival.payload(_MAX_BYTES)
    if payload is None:
        return None
    hello = decode_greeting(payload)
    if not isinstance(hello, Hello):
        raise ConnectionError(f"Hello expected, not {type(hello).__name__}")
    fds = arrival.take_fds(1)
    return None if fds is None else (hello, fds[0])


def connect(endpoint: str, hello: Hello, timeout_s: float) -> tuple[socket.socket, Lifeline, Welcome]:
    """Introduce oneself to the server at endpoint; returns what to watch it and its workers by, and its word.

    ConnectionError if nobody serves it, TimeoutError if it does not answer, StrangerError if it is
    another user's.
    """
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(ours)
    try:
        sock, welcome = _introduce(endpoint, hello, theirs.fileno(), timeout_s)
    except BaseException:
        lifeline.close()
        raise
    finally:
        theirs.close()
    return sock, lifeline, welcome


def _introduce(
    endpoint: str, hello: Hello, lifeline_fd: int, timeout_s: float
) -> tuple[socket.socket, Welcome]:
    sock = close_in_children(socket.socket(socket.AF_UNIX))
    try:
        sock.settimeout(timeout_s)
        _connect(sock, endpoint)
        send(sock, hello)
        send_fds(sock, [lifeline_fd])
        try:
            welcome = receive(sock)
        except msgspec.MsgspecError as error:
            raise ConnectionError(
                f"{endpoint} answered what is no greeting ({error}): stop what listens there, or restart the "
                "KVServer if it is of another version"
            ) from error
        if not isinstance(welcome, Welcome):
            raise ConnectionError(f"{endpoint} answered {type(welcome).__name__}")
    except BaseException:
        sock.close()
        raise
    return sock, welcome


def _connect(sock: socket.socket, endpoint: str) -> None:
    path = liveness_path(endpoint)
    try:
        sock.connect(path)
    except FileNotFoundError as error:
        raise ConnectionError(f"no KVServer at {endpoint}") from error
    except PermissionError:
        check_owner(path)
        raise
    check_peer(sock, path)


def is_gone(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection."""
    return wait_readable(sock)
