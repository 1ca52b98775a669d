"""KVServer: one process that runs the task engines of several engine instances of a node.

    liveness socket   a client introduces itself and stays connected; the end of that ends its engine
    ROUTER            requests; a wait is parked, so that it holds up nobody
    wake pipe         some task ended

Every client has an engine of its own (its client entry at the radix-server, its transfer worker), so
nothing that happens to one, its death included, touches another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time

import msgspec
import zmq

from flexkv_radix.metrics import MetricsEndpoint
from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from flexkv_radix.server.desk import Address, Desk
from flexkv_radix.server.spawn import EndpointLock

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
        self._strangers: dict[int, socket.socket] = {}  # connected, but silent so far; by descriptor
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
        self._router_fd = int(self._router.getsockopt(zmq.FD))
        self._poller = select.poll()
        for fd in (self._router_fd, self._listener.fileno(), self._wake_read):
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
        if self._listener.fileno() in ready:
            self._accept()
        for desk in list(self._desks.values()):
            if desk.sock.fileno() in ready:
                self._part(desk)
        for fd in self._strangers.keys() & ready:  # after the desks: a stranger's fd becomes a desk's
            self._meet(fd)
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
            try:
                request = m.decode_request(b"".join(frames))
            except msgspec.MsgspecError as error:
                logger.warning("an unreadable request was dropped: %s", error)
                continue
            self._serve((client, request.call), request)

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

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.settimeout(liveness.GREETING_TIMEOUT_S)
            self._strangers[sock.fileno()] = sock
            self._poller.register(sock.fileno(), select.POLLIN)

    def _meet(self, fd: int) -> None:
        """A stranger has something to say, or has left."""
        sock = self._strangers.pop(fd)
        self._poller.unregister(fd)
        try:
            self._greet(sock)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("a client did not introduce itself: %s", error)
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        hello, lifeline_fd = liveness.receive_hello(sock)
        refusal = self._refusal(hello)
        if refusal is not None:
            os.close(lifeline_fd)
            liveness.send(sock, refusal)
            sock.close()
            return
        desk = Desk(hello, sock, lifeline_fd, self._metrics, self._wake)
        self._desks[desk.token] = desk
        self._poller.register(sock.fileno(), select.POLLIN)
        liveness.send(sock, m.Welcome(desk.token))
        logger.info("client %d (pid %d) came", desk.dp_client_id, desk.pid)

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
        self._poller.unregister(desk.sock.fileno())
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
        for sock in self._strangers.values():
            sock.close()
        self._router.close(linger=0)
        for desk in list(self._desks.values()):
            self._part(desk)
        for desk in self._closing:
            desk.join()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._lock.close()
