"""KVServer: one process that runs the task engines of several engine instances of a node.

    liveness socket   a client introduces itself and stays connected; the end of that ends its engine
    ROUTER            requests; a wait is parked, so that it holds up nobody
    wake pipe         some task ended

Every client has an engine of its own (its client entry at the radix-server, its transfer worker), so
nothing that happens to one, its death included, touches another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from flexkv_radix.metrics import MetricsEndpoint
from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from flexkv_radix.server.desk import Address, Desk
from flexkv_radix.server.spawn import EndpointLock
from flexkv_radix.transfer.peers import Peer
from flexkv_radix.transfer.reception import Arrival, Reception

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_IDLE_S = 10.0  # longer than an engine takes from finding the server to introducing itself


class KVServer:
    """Serves endpoint (ipc:///path) until stop().

    exit_when_idle: also stop when no client was connected for a while.  Raises BlockingIOError if the
    endpoint is served already.
    """

    def __init__(
        self, endpoint: str, *, exit_when_idle: bool = False, metrics: MetricsEndpoint | None = None
    ) -> None:
        self._endpoint = endpoint
        self._exit_when_idle = exit_when_idle
        self._metrics = metrics
        self._lock = EndpointLock(endpoint)
        self._desks: dict[bytes, Desk] = {}  # by token
        self._closing: list[Desk] = []
        self._last_client_s = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        self._listener = liveness.listen(endpoint)
        self._reception = Reception()
        self._reception.open(self._listener, self._meet)
        self._router_fd = int(self._router.getsockopt(zmq.FD))
        self._poller = select.poll()
        for fd in (self._router_fd, self._reception.fileno(), self._wake_read):
            self._poller.register(fd, select.POLLIN)

    def start(self) -> KVServer:
        """Serve on a thread."""
        self._thread = threading.Thread(target=self.serve, name="flexkv-server")
        self._thread.start()
        return self

    def request_stop(self) -> None:
        """Make serve() return soon; safe in a signal handler."""
        self._stop.set()
        self._wake()

    def stop(self) -> None:
        """Make serve() return, and wait for it if it runs on a thread; clients see the server's end."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join()

    def serve(self) -> None:
        """Serve clients on this thread until stop() or idle."""
        logger.info("KVServer at %s", self._endpoint)
        try:
            while not self._stop.is_set() and not self._is_idle():
                self._step()
        finally:
            self._close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread will wake anyway
            os.write(self._wake_write, b"w")

    # -- the loop

    def _step(self) -> None:
        # ZeroMQ's descriptor tells only of a change, so requests are served until there is none, right
        # before the poll: nothing may be sent in between, because that can eat the change.
        self._serve_requests()
        ready = {fd for fd, _ in self._poller.poll(self._timeout_ms())}
        if self._router_fd in ready:  # before anything else: somebody waits for the answer
            self._serve_requests()
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        for desk in list(self._desks.values()):
            if not ready.isdisjoint(desk.peer.files):
                self._part(desk)
        self._reception.serve()
        now_s = time.monotonic()
        for desk in self._desks.values():
            for address, reply in desk.due_replies(now_s):
                self._reply(address, reply)
        self._closing = [desk for desk in self._closing if not desk.is_closed]

    def _timeout_ms(self) -> int:
        deadlines = [at for desk in self._desks.values() if (at := desk.next_deadline_s()) is not None]
        return max(0, round(min([_TICK_S, *(at - time.monotonic() for at in deadlines)]) * 1000))

    def _serve_requests(self) -> None:
        while True:
            try:
                client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            data = b"".join(frames)
            try:
                request = m.decode_request(data)
            except (msgspec.MsgspecError, RecursionError) as error:
                self._refuse(client, data, f"the KVServer cannot read the request: {error}")
            else:
                self._serve((client, request.call), request)

    def _refuse(self, client: bytes, data: bytes, why: str) -> None:
        call = m.call_of(data)
        if call is None:
            logger.warning("dropped: %s", why)
        else:
            self._reply((client, call), m.Failure(why, is_argument=True))

    def _serve(self, address: Address, request: m.Request) -> None:
        desk = self._desks.get(request.token)
        if desk is None:
            self._reply(address, m.Failure("the KVServer does not know this client", is_argument=False))
        elif (outcome := desk.serve(address, request.verb)) is not None:
            self._reply(address, outcome)

    def _reply(self, address: Address, outcome: m.Outcome) -> None:
        client, call = address
        self._router.send_multipart((client, m.encode(m.Reply(call, outcome))))

    # -- clients

    def _meet(self, arrival: Arrival) -> Callable[[], None] | None:
        hello = liveness.read_hello(arrival)
        return None if hello is None else functools.partial(self._greet, arrival.sock, *hello)

    def _greet(self, sock: socket.socket, hello: m.Hello, lifeline_fd: int) -> None:
        desk = self._refusal(hello) or self._new_desk(hello, sock, lifeline_fd)
        if isinstance(desk, m.Welcome):
            os.close(lifeline_fd)
            with sock, contextlib.suppress(OSError):  # it has left
                liveness.send(sock, desk)
            return
        self._desks[desk.token] = desk
        for fd in desk.peer.files:
            self._poller.register(fd, select.POLLIN)
        with contextlib.suppress(OSError):  # it has left: the next poll tells
            liveness.send(sock, m.Welcome(desk.token))
        logger.info("client %d (pid %d) came", desk.dp_client_id, desk.pid)

    def _new_desk(self, hello: m.Hello, sock: socket.socket, lifeline_fd: int) -> Desk | m.Welcome:
        """The desk, or why there cannot be one now."""
        try:
            return Desk(hello, Peer(sock), lifeline_fd, self._metrics, self._wake)
        except (OSError, RuntimeError) as error:  # too many open files, or threads
            why = f"the KVServer cannot take another client: {error}"
            logger.warning("%s", why)
            return m.Welcome(b"", why, try_again=True)

    def _refusal(self, hello: m.Hello) -> m.Welcome | None:
        wanted = hello.spec.dp_client_id
        if any(desk.dp_client_id == wanted for desk in self._closing):
            return m.Welcome(
                b"", f"the last engine with dp_client_id {wanted} is still leaving", try_again=True
            )
        for desk in self._desks.values():
            if desk.dp_client_id == wanted:
                return m.Welcome(
                    b"",
                    f"dp_client_id {wanted} is in use by process {desk.pid}: give each instance its own "
                    "FLEXKV_INSTANCE_ID",
                    try_again=True,
                )
        return None

    def _part(self, desk: Desk) -> None:
        logger.info("client %d (pid %d) left", desk.dp_client_id, desk.pid)
        for fd in desk.peer.files:
            self._poller.unregister(fd)
        del self._desks[desk.token]
        self._closing.append(desk)
        self._last_client_s = time.monotonic()
        desk.close()

    def _is_idle(self) -> bool:
        if not self._exit_when_idle or self._desks or self._closing:
            return False
        return time.monotonic() - self._last_client_s > _IDLE_S

    def _close(self) -> None:
        path = self._endpoint.removeprefix("ipc://")
        for file in (path, liveness.liveness_path(self._endpoint)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        self._listener.close()
        self._reception.close()
        self._router.close(linger=0)
        for desk in list(self._desks.values()):
            self._part(desk)
        for desk in self._closing:
            desk.join()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._lock.close()
