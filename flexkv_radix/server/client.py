"""KVDPClient: the backend of a KVManager whose tasks run in the node's KVServer.

Each thread has a ZeroMQ socket of its own, so one thread's wait holds up no other.  When the server
dies, every call in progress returns within a second: matches find nothing, tasks are FAILED, and the
cache is off from then on.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import zmq

from flexkv_radix.config import CacheConfig
from flexkv_radix.launching import Launch
from flexkv_radix.lifecycle import Member
from flexkv_radix.planner import NO_BLOCKS, Blocks
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.ring import Hashes, RingEvents
from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from flexkv_radix.server.spawn import ensure_server
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Answer
from radixshmem import RadixError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 60.0
_RETRY_S = 0.1
_CHECK_MS = 200  # how often a waiting call looks whether the server is alive
_REPLY_TIMEOUT_S = 30.0  # of verbs that never wait: a server that lives but does not answer is broken
_MAX_MISSES = 1024
R = TypeVar("R")


class KVServerDied(RadixError):  # noqa: N818
    """The KVServer is gone, or answers no more."""


class KVDPClient:
    """One data-parallel group's connection to the KVServer at endpoint."""

    def __init__(self, endpoint: str, spec: EngineSpec, *, launch_server: bool) -> None:
        """launch_server: start a server if nobody serves endpoint."""
        liveness.liveness_path(endpoint)  # refuse a wrong endpoint here, not behind start()
        self._endpoint = endpoint
        self._spec = spec
        self._launch_server = launch_server
        self._context = zmq.Context()
        self._local = threading.local()
        self._calls = itertools.count(1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._lock = threading.Lock()
        self._alive: socket.socket | None = None
        self._token = b""
        self._misses = _Misses()
        self._counts: m.StateReply | None = None
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._connect, name="flexkv-connect", daemon=True)
        self.disabled = ""

    # -- life

    def start(self) -> None:
        """Connect behind the caller's back; returns at once."""
        self._thread.start()

    def is_ready(self) -> bool:
        """As of KVTaskEngine.  RuntimeError with the cause if starting failed."""
        if self._failure is not None:
            raise RuntimeError(f"the KV cache could not start: {self._failure}") from self._failure
        if self.disabled or self._counts is not None:
            return True
        if not self._token:
            return False
        try:
            state = self._call(m.State(), m.StateReply)
        except KVServerDied:
            return True
        if state.disabled:
            self.disabled = state.disabled
        elif state.is_ready:
            self._counts = state
        return state.is_ready

    def shutdown(self) -> None:
        """Leave the server, which ends this client's tasks and no other's.  A second call does nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            for sock in self._sockets:
                sock.close(linger=0)
            self._sockets.clear()
            if self._alive is not None:
                self._alive.close()
                self._alive = None
        self.disabled = self.disabled or "shut down"
        self._context.term()

    def adopt_into(self, cache_config: CacheConfig) -> None:
        """Take the server's counts over into cache_config."""
        if (counts := self._counts) is not None:
            cache_config.num_cpu_blocks = counts.num_cpu_blocks
            if cache_config.swa is not None:
                cache_config.swa.num_slots = counts.num_swa_slots
            cache_config.node_rank, cache_config.num_nodes = counts.node_rank, counts.num_nodes
            cache_config.enable_kv_sharing = counts.num_nodes > 1

    def _connect(self) -> None:
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        hello = m.Hello(self._spec, os.getpid())
        error: Exception = TimeoutError("not tried")
        while not self._stop.is_set():
            try:
                if self._launch_server:
                    ensure_server(self._endpoint)
                alive, welcome = liveness.connect(self._endpoint, hello, _REPLY_TIMEOUT_S)
            except OSError as os_error:
                error = os_error
            else:
                if not welcome.error:
                    self._alive, self._token = alive, welcome.token
                    return
                alive.close()
                error = RuntimeError(welcome.error)
                if not welcome.try_again:
                    break
            if time.monotonic() > deadline_s:
                break
            self._stop.wait(_RETRY_S)
        if not self._stop.is_set():
            self._refused(error)

    def _refused(self, error: Exception) -> None:
        if self._spec.strict:
            self._failure = error
        self._disable(f"KVServer {self._endpoint}: {error}")

    def _disable(self, why: str) -> None:
        with self._lock:
            if self.disabled:
                return
            self.disabled = why
        logger.warning("running without the KV cache: %s", why)

    # -- verbs

    def get_match(
        self, hashes: Hashes, num_tokens: int, wanted: Blocks, *, swa: bool = False
    ) -> tuple[int, Blocks]:
        """As of KVTaskEngine."""
        return self._match(m.Match(False, m.pack_hashes(hashes), num_tokens, m.pack_blocks(wanted), swa))

    def put_match(
        self, hashes: Hashes, num_tokens: int, wanted: Blocks, *, swa: bool = False
    ) -> tuple[int, Blocks]:
        """As of KVTaskEngine."""
        return self._match(m.Match(True, m.pack_hashes(hashes), num_tokens, m.pack_blocks(wanted), swa))

    def _match(self, verb: m.Match) -> tuple[int, Blocks]:
        reply = self._try(verb, m.Matched)
        if reply is None:
            return self._misses.add(verb.num_tokens), NO_BLOCKS
        return reply.task_id, m.unpack_blocks(reply.blocks)

    def prefetch(self, hashes: Hashes, num_tokens: int, *, swa: bool = False) -> int:
        """As of KVTaskEngine."""
        reply = self._try(m.Prefetch(m.pack_hashes(hashes), num_tokens, swa), m.TaskIds)
        return self._misses.add(num_tokens) if reply is None else reply.task_ids[0]

    def launch(
        self,
        launches: Sequence[Launch],
        *,
        as_batch: bool = False,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """As of KVTaskEngine."""
        packed = [m.pack_launch(launch) for launch in launches if launch.task_id > 0]
        reply = self._try(m.LaunchAll(packed, as_batch, layerwise, counter_id), m.TaskIds) if packed else None
        if reply is None:
            return [launch.task_id for launch in launches][: 1 if as_batch else None]
        misses = [launch.task_id for launch in launches if launch.task_id <= 0]
        return reply.task_ids if as_batch else [*reply.task_ids, *misses]

    def poll(self, task_ids: Sequence[int]) -> dict[int, Answer]:
        """As of KVTaskEngine."""
        misses, tasks = self._misses.take(task_ids)
        reply = self._try(m.Poll(tasks), m.Answers)
        return misses | (self._lost(tasks) if reply is None else m.unpack_answers(reply))

    def wait(self, task_ids: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """As of KVTaskEngine."""
        misses, tasks = self._misses.take(task_ids)
        reply = self._try(m.Wait(tasks, timeout_s), m.Answers, timeout_s)
        return misses | (self._lost(tasks) if reply is None else m.unpack_answers(reply))

    def cancel(self, task_ids: Sequence[int]) -> None:
        """As of KVTaskEngine."""
        self._try(m.Cancel(list(task_ids)), m.Done)

    def cancel_all(self) -> None:
        """As of KVTaskEngine."""
        self._try(m.Cancel([], everything=True), m.Done)

    def ring_events(self, cursor: int) -> RingEvents | None:
        """As of KVTaskEngine."""
        reply = self._try(m.Ring(cursor), m.RingReply)
        return None if reply is None else m.unpack_ring(reply)

    def num_present(self, hashes: Hashes) -> int:
        """As of KVTaskEngine."""
        reply = self._try(m.Present(m.pack_hashes(hashes)), m.PresentReply)
        return 0 if reply is None else reply.num_blocks

    def _lost(self, task_ids: Sequence[int]) -> dict[int, Answer]:
        return {task_id: Answer(KVResponseStatus.FAILED, error=self.disabled) for task_id in task_ids}

    # -- calls

    def _try(self, verb: m.Verb, expected: type[R], wait_s: float = 0.0) -> R | None:
        """The reply; None while there is no server to ask, or when it died."""
        if not self._token or self.disabled:
            return None
        try:
            return self._call(verb, expected, wait_s)
        except KVServerDied:
            return None

    def _call(self, verb: m.Verb, expected: type[R], wait_s: float = 0.0) -> R:
        sock, call = self._socket(), next(self._calls)
        sock.send(m.encode(m.Request(self._token, call, verb)))
        outcome = self._receive(sock, call, wait_s + _REPLY_TIMEOUT_S)
        if isinstance(outcome, expected):
            return outcome
        if isinstance(outcome, m.Failure):
            raise (ValueError if outcome.is_argument else RadixError)(outcome.error)
        raise RadixError(f"the KVServer answered {type(verb).__name__} with {type(outcome).__name__}")

    def _receive(self, sock: zmq.Socket[bytes], call: int, timeout_s: float) -> m.Outcome:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                reply = m.decode_reply(sock.recv())
            except zmq.Again:
                self._check_alive(deadline_s)
            else:
                if reply.call == call:  # not a late reply to a call that was given up
                    return reply.outcome

    def _check_alive(self, deadline_s: float) -> None:
        if self._alive is None or liveness.is_gone(self._alive):
            why = f"KVServer {self._endpoint}: it is gone"
        elif time.monotonic() > deadline_s:
            why = f"KVServer {self._endpoint}: no answer"
        else:
            return
        self._disable(why)
        raise KVServerDied(why)

    def _socket(self) -> zmq.Socket[bytes]:
        """This thread's socket."""
        sock: zmq.Socket[bytes] | None = getattr(self._local, "socket", None)
        if sock is None:
            sock = self._local.socket = self._context.socket(zmq.DEALER)
            sock.rcvtimeo = _CHECK_MS
            sock.connect(self._endpoint)
            with self._lock:
                self._sockets.append(sock)
        return sock


class _Misses:
    """Tasks that were over at once because there is no server to ask.  Their ids are negative."""

    def __init__(self) -> None:
        self._num_tokens: OrderedDict[int, int] = OrderedDict()
        self._ids = itertools.count(-1, -1)
        self._lock = threading.Lock()

    def add(self, num_tokens: int) -> int:
        with self._lock:
            task_id = next(self._ids)
            self._num_tokens[task_id] = num_tokens
            while len(self._num_tokens) > _MAX_MISSES:
                self._num_tokens.popitem(last=False)
            return task_id

    def take(self, task_ids: Sequence[int]) -> tuple[dict[int, Answer], list[int]]:
        """(answers of the misses among task_ids, the other ids)."""
        answers = {}
        with self._lock:
            for task_id in task_ids:
                if task_id <= 0:
                    num_tokens = self._num_tokens.pop(task_id, None)
                    answers[task_id] = (
                        Answer(KVResponseStatus.NOT_FOUND)
                        if num_tokens is None
                        else Answer(KVResponseStatus.SUCCESS, (Member(num_tokens, NO_BLOCKS),))
                    )
        return answers, [task_id for task_id in task_ids if task_id > 0]
