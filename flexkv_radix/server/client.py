"""KVDPClient: the backend of a KVManager whose tasks run in the node's KVServer.

Each thread has a ZeroMQ socket of its own, so one thread's wait holds up no other.  When the server
dies, every call in progress returns within a second: matches find nothing and tasks are FAILED, until
there is a server again (connection.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import zmq

from flexkv_radix.config import CacheConfig
from flexkv_radix.launching import Launch
from flexkv_radix.lifecycle import Member
from flexkv_radix.planner import NO_BLOCKS, Blocks
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.ring import Hashes, RingEvents
from flexkv_radix.server import messages as m
from flexkv_radix.server.connection import REPLY_TIMEOUT_S, Connection, KVServerDied, Server
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Answer
from radixshmem import RadixError

_CHECK_MS = 200  # how often a waiting call looks whether the server is alive
_MAX_MISSES = 1024
_GENERATION = 1 << 40  # a task's number is its number at the server, plus this for each earlier server
R = TypeVar("R")


class KVDPClient:
    """One data-parallel group's connection to the KVServer at endpoint."""

    def __init__(self, endpoint: str, spec: EngineSpec, *, launch_server: bool) -> None:
        """launch_server: start a server if nobody serves endpoint."""
        self._endpoint = endpoint
        self._connection = Connection(endpoint, spec, launch_server=launch_server, why_off=self._why_off)
        self._context = zmq.Context()
        self._local = threading.local()
        self._calls = itertools.count(1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._lock = threading.Lock()
        self._misses = _Misses()
        self._counts: m.StateReply | None = None  # once the engine was ready
        self._ring_generation = 0

    # -- life

    def start(self) -> None:
        """Connect behind the caller's back; returns at once."""
        self._connection.start()

    def is_ready(self) -> bool:
        """As of KVTaskEngine.  RuntimeError with the cause if starting failed."""
        connection = self._connection
        if connection.failure is not None:
            raise RuntimeError(f"the KV cache could not start: {connection.failure}") from connection.failure
        server = connection.server
        if connection.off or self._counts is not None:
            return True
        if server is None:
            return False
        try:
            state = self._state(server)
        except KVServerDied:
            return True
        if state.is_ready and not state.disabled:
            self._counts = state
        return state.is_ready

    @property
    def disabled(self) -> str:
        """Why the cache is off; "" if it is not.  Asks the server."""
        off, server = self._connection.off, self._connection.server
        if off or server is None:
            return off
        try:
            return self._state(server).disabled
        except RadixError as error:
            return str(error)

    def shutdown(self) -> None:
        """Leave the server, which ends this client's tasks and no other's.  A second call does nothing."""
        self._connection.close()
        with self._lock:
            for sock in self._sockets:
                sock.close(linger=0)
            self._sockets.clear()
        self._context.term()

    def adopt_into(self, cache_config: CacheConfig) -> None:
        """Take the server's counts over into cache_config."""
        if (counts := self._counts) is not None:
            cache_config.num_cpu_blocks = counts.num_cpu_blocks
            if cache_config.swa is not None:
                cache_config.swa.num_slots = counts.num_swa_slots
            cache_config.node_rank, cache_config.num_nodes = counts.node_rank, counts.num_nodes
            cache_config.enable_kv_sharing = counts.num_nodes > 1

    def _state(self, server: Server) -> m.StateReply:
        return self._call(server, m.State(), m.StateReply)

    def _why_off(self, server: Server) -> str | None:
        state = self._state(server)
        return state.disabled if state.is_ready else None

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
        server = self._usable()
        reply = self._try(server, verb, m.Matched)
        if reply is None or server is None:
            return self._misses.add(verb.num_tokens), NO_BLOCKS
        return _outer(server, reply.task_id), m.unpack_blocks(reply.blocks)

    def prefetch(self, hashes: Hashes, num_tokens: int, *, swa: bool = False) -> int:
        """As of KVTaskEngine."""
        server = self._usable()
        reply = self._try(server, m.Prefetch(m.pack_hashes(hashes), num_tokens, swa), m.TaskIds)
        if reply is None or server is None:
            return self._misses.add(num_tokens)
        return _outer(server, reply.task_ids[0])

    def launch(
        self,
        launches: Sequence[Launch],
        *,
        as_batch: bool = False,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """As of KVTaskEngine.  Misses, and tasks of a server that died, are over and stay as they are.

        A batch that could not be launched is FAILED: the id returned is one of a task that was lost.
        """
        server = self._usable()
        known = [launch for launch in launches if _is_of(server, launch.task_id)]
        lost = [one.task_id for one in launches if one.task_id > 0 and not _is_of(server, one.task_id)]
        reply = None
        if known and not (as_batch and lost):
            packed = [m.pack_launch(replace(one, task_id=one.task_id % _GENERATION)) for one in known]
            reply = self._try(server, m.LaunchAll(packed, as_batch, layerwise, counter_id), m.TaskIds)
        elif known:  # a batch is done as a whole or not at all
            self.cancel([launch.task_id for launch in known])
        ids = [launch.task_id for launch in launches]
        if as_batch and len(ids) > 1 and max(ids) <= 0:
            return [self._misses.merge(ids)]
        if reply is None or server is None:
            return ids if not as_batch else [*lost, *(one.task_id for one in known), *ids][:1]
        outer = [_outer(server, task_id) for task_id in reply.task_ids]
        if as_batch:
            return outer
        started = dict(zip((launch.task_id for launch in known), outer, strict=True))
        return [started.get(task_id, task_id) for task_id in ids]

    def poll(self, task_ids: Sequence[int]) -> dict[int, Answer]:
        """As of KVTaskEngine."""
        return self._answers(task_ids, m.Poll, 0.0)

    def wait(self, task_ids: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """As of KVTaskEngine."""
        return self._answers(task_ids, lambda ids: m.Wait(ids, timeout_s), timeout_s)

    def _answers(
        self, task_ids: Sequence[int], verb_of: Callable[[list[int]], m.Verb], wait_s: float
    ) -> dict[int, Answer]:
        server = self._usable()
        answers, tasks = self._misses.take(task_ids)
        known = [task_id for task_id in tasks if _is_of(server, task_id)]
        if known and server is not None:
            reply = self._try(
                server, verb_of([task_id % _GENERATION for task_id in known]), m.Answers, wait_s
            )
            if reply is not None:
                told = m.unpack_answers(reply)
                answers |= {_outer(server, task_id): answer for task_id, answer in told.items()}
                tasks = [task_id for task_id in tasks if not _is_of(server, task_id)]
        why = self._connection.off or f"KVServer {self._endpoint}: the one that ran the task is gone"
        return answers | {task_id: Answer(KVResponseStatus.FAILED, error=why) for task_id in tasks}

    def cancel(self, task_ids: Sequence[int]) -> None:
        """As of KVTaskEngine."""
        server = self._usable()
        known = [task_id % _GENERATION for task_id in task_ids if _is_of(server, task_id)]
        self._try(server, m.Cancel(known), m.Done)

    def cancel_all(self) -> None:
        """As of KVTaskEngine."""
        self._try(self._usable(), m.Cancel([], everything=True), m.Done)

    def ring_events(self, cursor: int) -> RingEvents | None:
        """As of KVTaskEngine.  Overflow where the server is another one than at the last call."""
        server = self._usable()
        if server is None:
            return None
        is_new = server.generation != self._ring_generation
        reply = self._try(server, m.Ring(-1 if is_new else cursor), m.RingReply)
        events = None if reply is None else m.unpack_ring(reply)
        if events is None:
            return None
        self._ring_generation = server.generation
        return replace(events, overflow=True) if is_new else events

    def num_present(self, hashes: Hashes) -> int:
        """As of KVTaskEngine."""
        reply = self._try(self._usable(), m.Present(m.pack_hashes(hashes)), m.PresentReply)
        return 0 if reply is None else reply.num_blocks

    # -- calls

    def _usable(self) -> Server | None:
        """The server while the cache is on."""
        return None if self._connection.off else self._connection.server

    def _try(self, server: Server | None, verb: m.Verb, expected: type[R], wait_s: float = 0.0) -> R | None:
        """The reply; None without a server, or when it died."""
        if server is None:
            return None
        try:
            return self._call(server, verb, expected, wait_s)
        except KVServerDied:
            return None

    def _call(self, server: Server, verb: m.Verb, expected: type[R], wait_s: float = 0.0) -> R:
        sock, call = self._socket(), next(self._calls)
        sock.send(m.encode(m.Request(server.token, call, verb)))
        outcome = self._receive(server, sock, call, wait_s + REPLY_TIMEOUT_S)
        if isinstance(outcome, expected):
            return outcome
        if isinstance(outcome, m.Failure):
            raise (ValueError if outcome.is_argument else RadixError)(outcome.error)
        raise RadixError(f"the KVServer answered {type(verb).__name__} with {type(outcome).__name__}")

    def _receive(self, server: Server, sock: zmq.Socket[bytes], call: int, timeout_s: float) -> m.Outcome:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                reply = m.decode_reply(sock.recv())
            except zmq.Again:
                self._check_alive(server, deadline_s)
            else:
                if reply.call == call:  # not a late reply to a call that was given up
                    return reply.outcome

    def _check_alive(self, server: Server, deadline_s: float) -> None:
        if server.is_gone():
            why = f"KVServer {self._endpoint}: it is gone"
        elif time.monotonic() > deadline_s:
            why = f"KVServer {self._endpoint}: no answer"
        else:
            return
        self._connection.lost(server, why)
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


def _outer(server: Server, task_id: int) -> int:
    """A task's number for the caller."""
    return server.generation * _GENERATION + task_id


def _is_of(server: Server | None, task_id: int) -> bool:
    """Whether server gave the task out."""
    return server is not None and task_id > 0 and task_id // _GENERATION == server.generation


class _Misses:
    """Tasks that were over at once because there is no server to ask.  Their ids are negative."""

    def __init__(self) -> None:
        self._num_tokens: OrderedDict[int, list[int]] = OrderedDict()  # of each member
        self._ids = itertools.count(-1, -1)
        self._lock = threading.Lock()

    def add(self, *num_tokens: int) -> int:
        with self._lock:
            task_id = next(self._ids)
            self._num_tokens[task_id] = [*num_tokens]
            while len(self._num_tokens) > _MAX_MISSES:
                self._num_tokens.popitem(last=False)
            return task_id

    def merge(self, task_ids: Sequence[int]) -> int:
        """One task with the members of all."""
        with self._lock:
            members = [self._num_tokens.pop(task_id, []) for task_id in task_ids]
        return self.add(*itertools.chain.from_iterable(members))

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
                        else Answer(
                            KVResponseStatus.SUCCESS, tuple(Member(num, NO_BLOCKS) for num in num_tokens)
                        )
                    )
        return answers, [task_id for task_id in task_ids if task_id > 0]
