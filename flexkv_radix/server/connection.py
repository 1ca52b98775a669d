"""A client's connection to the KVServer, made again when the server was replaced.

    connecting --welcome--> connected --engine ready--> usable      `server` is set while connected,
        ^                       |                         |         `off` is "" while usable
        +----- server gone -----+-------------------------+
        | refused, or an embedded server that dies again and again
        v
       off

Task numbers of one server mean nothing to the next: whoever calls takes `server` once, and stays with it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable

from flexkv_radix.restarts import Restarts
from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from flexkv_radix.server.lines import Lines
from flexkv_radix.server.spawn import ensure_server
from flexkv_radix.spec import EngineSpec
from flexkv_radix.transfer.lifeline import Lifeline
from flexkv_radix.transfer.peers import StrangerError
from radixshmem import RadixError

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 30.0  # of verbs that never wait: a server that lives but does not answer is broken
_CONNECT_TIMEOUT_S = 60.0  # until the engine is told to go on without
_RETRY_S = 0.1
_LATER_RETRY_S = 1.0
_WATCH_S = 0.2
_JOIN_S = 2.0
_OVER_POLL_S = 0.01
# A killed server's worker is killed with it, which takes the driver of a device a moment.  One that the
# kernel cannot end by then may never end, and the engine waits to go on.
_WORKER_TIMEOUT_S = 5.0


class KVServerDied(RadixError):  # noqa: N818 - says what happened, as TransferDied does
    """The KVServer is gone, or answers no more."""


class Server:
    """One server that this client was welcomed by."""

    def __init__(
        self, generation: int, token: bytes, lines: Lines, alive: socket.socket, lifeline: Lifeline
    ) -> None:
        self.generation = generation  # 0: the first one
        self.token = token
        self.lines = lines
        self._alive = alive
        self._lifeline = lifeline
        self._lost_s = math.inf

    def is_gone(self) -> bool:
        try:
            return liveness.is_gone(self._alive)
        except (OSError, ValueError):  # close() on another thread
            return True

    def close(self) -> None:
        """Leave: the server ends this client's tasks."""
        self._lost_s = min(self._lost_s, time.monotonic())
        self._alive.close()
        self.lines.close()

    def forget(self) -> None:
        """Leave a server that never had a task."""
        self.close()
        self._lifeline.close()

    def is_over(self) -> bool:
        """Whether the server's workers are gone as well, or nobody can tell; not for two threads at once."""
        if not self._lifeline.is_over():
            if time.monotonic() < self._lost_s + _WORKER_TIMEOUT_S:
                return False
            logger.warning(
                "the transfer worker of a lost KVServer has not ended within %g s", _WORKER_TIMEOUT_S
            )
        self._lifeline.close()
        return True


class Connection:
    """Keeps one client connected to the KVServer at endpoint, on a thread of its own.

    why_off(server) asks for the state of the client's engine there: None while it starts, "" when it
    serves; RadixError if it failed.
    """

    def __init__(
        self, endpoint: str, spec: EngineSpec, *, launch_server: bool,
        why_off: Callable[[Server], str | None],
    ) -> None:  # fmt: skip
        liveness.liveness_path(endpoint)  # refuse a wrong endpoint here, not behind start()
        self._endpoint = endpoint
        self._spec = spec
        self._launch_server = launch_server
        self._why_off = why_off
        self._restarts = Restarts()
        self._num_welcomes = 0
        self._servers: dict[int, Server] = {}  # by generation: this one, and those that are not over
        self._stop = threading.Event()
        self._is_lost = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="flexkv-connect", daemon=True)
        self.server: Server | None = None  # while connected
        self.off = ""  # why the cache is off, for good or until it is back
        self.failure: Exception | None = None  # of start-up; for is_ready() to raise

    def start(self) -> None:
        """Connect behind the caller's back; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Leave the server, and see its worker gone.  A second call does nothing."""
        self._stop.set()
        self._is_lost.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)  # it may wait for a server that does not greet
        self.off = self.off or "shut down"
        while not all(self.is_over(generation) for generation in list(self._servers)):
            time.sleep(_OVER_POLL_S)

    def is_over(self, generation: int) -> bool:
        """Whether the server of that generation is gone and nobody moves blocks for it any more."""
        with self._lock:
            server = self._servers.get(generation)
            if server is None:
                return True
            if server is self.server or not server.is_over():
                return False
            del self._servers[generation]
            return True

    def lost(self, server: Server, why: str) -> None:
        """server does not answer: the cache is off until there is another."""
        with self._lock:
            if self.server is not server:
                return
            self.server = None
            self._is_lost.set()
            server.close()
        self._turn_off(why)

    # -- the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            server = self._connect()
            if server is None:
                return
            try:
                self._keep(server)
            finally:
                with self._lock:
                    self.server = None
                server.close()
            if not self._may_try_again():
                return

    def _keep(self, server: Server) -> None:
        """Until the engine stops or the server is lost."""
        self._is_lost.clear()
        with self._lock:
            self.server = self._servers[server.generation] = server
        while not self._stop.is_set() and not self._is_lost.wait(_WATCH_S):
            if server.is_gone():
                self.lost(server, f"KVServer {self._endpoint}: it is gone")
            elif self.off:
                self._try_to_use(server)

    def _try_to_use(self, server: Server) -> None:
        try:
            why = self._why_off(server)
        except KVServerDied:
            return  # lost() was called
        except RadixError as error:
            why = str(error)
        if why == "":
            self.off = ""
            logger.warning("the KV cache is back")
        elif why is not None and why != self.off:
            self._turn_off(why)

    def _may_try_again(self) -> bool:
        pause_s = self._restarts.died(time.monotonic())
        if pause_s is None and self._launch_server:
            self._turn_off(f"KVServer {self._endpoint}: {self._restarts}, it is not started again")
            return False
        self._stop.wait(_LATER_RETRY_S if pause_s is None else pause_s)
        return True

    def _connect(self) -> Server | None:
        """A server, however long it takes; None when the engine stops or the server refuses."""
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while not self._stop.is_set():
            try:
                server, refusal = self._greet()
            except OSError as error:
                server, refusal = None, m.Welcome(b"", str(error), try_again=True)
            except StrangerError as error:
                server, refusal = None, m.Welcome(b"", str(error))
            if server is not None and self._stop.is_set():  # it greeted when close() waited no more
                server.forget()
                return None
            if server is not None:
                return server
            is_late = time.monotonic() > deadline_s
            if not refusal.try_again or (is_late and not self.off):
                self._refused(RuntimeError(refusal.error))
                if not refusal.try_again or self.failure is not None:
                    return None
            self._stop.wait(_LATER_RETRY_S if is_late else _RETRY_S)
        return None

    def _greet(self) -> tuple[Server | None, m.Welcome]:
        """The server's answer.  OSError if there is none, StrangerError if it is another user's."""
        if self._launch_server:
            ensure_server(self._endpoint)
        hello = m.Hello(self._spec, os.getpid())
        alive, lifeline, welcome = liveness.connect(self._endpoint, hello, REPLY_TIMEOUT_S)
        if welcome.error:
            alive.close()
            lifeline.close()
            return None, welcome
        server = Server(self._num_welcomes, welcome.token, Lines(self._endpoint), alive, lifeline)
        self._num_welcomes += 1
        return server, welcome

    def _refused(self, error: Exception) -> None:
        if self._spec.strict and not self._num_welcomes:
            self.failure = error
        self._turn_off(f"KVServer {self._endpoint}: {error}")

    def _turn_off(self, why: str) -> None:
        self.off = why
        logger.warning("running without the KV cache: %s", why)
