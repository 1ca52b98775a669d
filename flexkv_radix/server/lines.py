"""A client's ZeroMQ sockets to one server.

A call takes one and gives it back, so there are as many as calls went on at a time, however many threads
there were.  ZeroMQ lets a socket go from thread to thread where a lock is in between.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from flexkv_radix.transfer.peers import check_peer
from radixshmem import RadixError

_CONNECT_TIMEOUT_MS = 10_000
_CHECK_MS = 200  # then send and recv raise zmq.Again: a waiting call looks whether the server is alive
_NO_MORE = -1  # the value of reconnect_ivl that stands for never


class LineError(RadixError):
    """There is no socket for a call."""


class Lines:
    """Sockets to the server at endpoint, none of which is connected a second time: that is the next one's."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._idle: list[zmq.Socket[bytes]] = []
        self._num_taken = 0
        self._is_closed = False
        self._lock = threading.Lock()  # of these three

    @contextlib.contextmanager
    def take(self) -> Iterator[zmq.Socket[bytes]]:
        """A socket for one call.  LineError if there is none to be had, StrangerError at another user's."""
        with self._lock:
            if self._is_closed or self._pid != os.getpid():  # a forked process cannot use the parent's
                raise LineError("this process has left it")
            self._num_taken += 1
            sock = self._idle.pop() if self._idle else None
        try:
            if sock is None:
                sock = self._connect()
            yield sock
        except zmq.ZMQError as error:
            self._give_back(sock, is_good=False)
            raise LineError(str(error)) from error
        except BaseException:
            self._give_back(sock, is_good=False)
            raise
        else:
            self._give_back(sock, is_good=True)

    def _give_back(self, sock: zmq.Socket[bytes] | None, *, is_good: bool) -> None:
        with self._lock:
            self._num_taken -= 1
            is_last = self._is_closed and self._num_taken == 0
            if sock is not None and is_good and not self._is_closed:
                self._idle.append(sock)
            elif sock is not None:
                sock.close()
        if is_last:
            self._context.term()

    def close(self) -> None:
        """No more calls; those under way are not touched.  A second call does nothing."""
        with self._lock:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            is_last = self._num_taken == 0
        if is_last:
            self._context.term()

    def _connect(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        try:
            sock.linger = 0
            sock.reconnect_ivl = _NO_MORE
            sock.rcvtimeo = sock.sndtimeo = _CHECK_MS
            self._connect_checked(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connect_checked(self, sock: zmq.Socket[bytes]) -> None:
        """Connect sock, and see that no other user is at the other end before anything is sent."""
        monitor = sock.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED)
        try:
            sock.connect(self._endpoint)
            if not monitor.poll(_CONNECT_TIMEOUT_MS):
                raise LineError("no connection")
            event = recv_monitor_message(monitor)
            if event["event"] != zmq.EVENT_CONNECTED:
                raise LineError("nobody listens")
            with socket.socket(fileno=os.dup(event["value"])) as connection:
                check_peer(connection, self._endpoint.removeprefix("ipc://"))
        finally:
            sock.disable_monitor()
            monitor.close(linger=0)
