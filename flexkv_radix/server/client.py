"""KVDPClient: the backend of a KVManager whose tasks run in the node's KVServer.

Each call has a ZeroMQ socket for itself (lines.py), so one thread's wait holds up no other.  When the
server dies, every call in progress returns within a second: matches find nothing and tasks are FAILED (once
nobody moves their blocks any more), until there is a server again (connection.py).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

import zmq

from flexkv_radix.config import CacheConfig
from flexkv_radix.launching import Launch
from flexkv_radix.planner import NO_BLOCKS, Blocks
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.ring import Hashes, RingEvents
from flexkv_radix.server import messages as m
from flexkv_radix.server.connection import REPLY_TIMEOUT_S, Connection, KVServerDied, Server
from flexkv_radix.server.lines import LineError
from flexkv_radix.server.misses import Misses, is_miss
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Answer
from flexkv_radix.transfer.peers import StrangerError
from radixshmem import RadixError

_MOVING_POLL_S = 0.01
_GENERATION = 1 << 40  # a task's number is its number at the server, plus this for each earlier server
R = TypeVar("R")


class KVDPClient:
    """One data-parallel group's connection to the KVServer at endpoint."""

    def __init__(self, endpoint: str, spec: EngineSpec, *, launch_server: bool) -> None:
        """launch_server: start a server if nobody serves endpoint."""
        self._endpoint = endpoint
        self._connection = Connection(endpoint, spec, launch_server=launch_server, why_off=self._why_off)
        self._calls = itertools.count(1)
        self._misses = Misses()
        self._counts: m.StateReply | None = None  # as of when the engine was ready, or met another region
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
        if state.region:
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
        self._connection.close()  # calls under way see that the server is gone

    @property
    def region(self) -> str:
        """As of KVTaskEngine, but it stays while the cache is off."""
        return "" if self._counts is None else self._counts.region

    def adopt_into(self, cache_config: CacheConfig) -> str:
        """As of KVTaskEngine, but as of the last look."""
        if (counts := self._counts) is not None:
            cache_config.num_cpu_blocks = counts.num_cpu_blocks
            if cache_config.swa is not None:
                cache_config.swa.num_slots = counts.num_swa_slots
            cache_config.node_rank, cache_config.num_nodes = counts.node_rank, counts.num_nodes
            cache_config.enable_kv_sharing = counts.num_nodes > 1
        return "" if counts is None else counts.region

    def _look_again(self, server: Server) -> None:
        with contextlib.suppress(RadixError):  # the next match will tell
            state = self._state(server)
            if state.region:
                self._counts = state

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
            return self._misses.add(verb), NO_BLOCKS
        if reply.region and reply.region != self.region:
            self._look_again(server)
        return _outer(server, reply.task_id), m.unpack_blocks(reply.blocks)

    def prefetch(self, hashes: Hashes, num_tokens: int, *, swa: bool = False) -> int:
        """As of KVTaskEngine."""
        server = self._usable()
        verb = m.Prefetch(m.pack_hashes(hashes), num_tokens, swa)
        reply = self._try(server, verb, m.TaskIds)
        if reply is None or server is None:
            return self._misses.add(verb)
        return _outer(server, reply.task_ids[0])

    def launch(
        self,
        launches: Sequence[Launch],
        *,
        as_batch: bool = False,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """As of KVTaskEngine.  Tasks of a server that died are over; a batch with one of them is FAILED."""
        self._misses.check(launches)
        server = self._usable()
        if layerwise:
            _check_layerwise(server, launches)
        if as_batch and len(launches) > 1:
            return [self._launch_batch(server, launches, layerwise, counter_id)]
        known = [launch for launch in launches if _is_of(server, launch.task_id)]
        if known:
            packed = [_packed(launch) for launch in known]
            self._try(server, m.LaunchAll(packed, as_batch, layerwise, counter_id), m.TaskIds)
        return [launch.task_id for launch in launches]

    def _launch_batch(
        self, server: Server | None, launches: Sequence[Launch], layerwise: bool, counter_id: int
    ) -> int:
        """The id of the batch, or if it could not be launched that of a task that was lost: it FAILED."""
        ids = [launch.task_id for launch in launches]
        known = [task_id for task_id in ids if _is_of(server, task_id)]
        lost = [task_id for task_id in ids if not is_miss(task_id) and not _is_of(server, task_id)]
        if lost:  # a batch is done as a whole or not at all
            self.cancel(known)
            return lost[0]
        if server is None or not known:
            return self._misses.merge(ids)
        packed = self._packed_batch(server, launches)
        verb = m.LaunchAll(packed, True, layerwise, counter_id)
        reply = self._try(server, verb, m.TaskIds) if packed else None
        if reply is None:
            return known[0]
        self._misses.forget(ids)
        return _outer(server, reply.task_ids[0])

    def _packed_batch(self, server: Server, launches: Sequence[Launch]) -> list[m.LaunchMessage]:
        """launches with a task of the server in place of each miss; empty if the server died."""
        packed = []
        for launch in launches:
            if not is_miss(launch.task_id):
                packed.append(_packed(launch))
                continue
            for request in self._misses.requests(launch.task_id):
                task_id = self._ask_again(server, request)
                if task_id is None:
                    return []
                packed.append(_packed(replace(launch, task_id=task_id)))
        return packed

    def _ask_again(self, server: Server, request: m.Match | m.Prefetch) -> int | None:
        """The server's task for a miss; None if it died."""
        if isinstance(request, m.Match):
            matched = self._try(server, request, m.Matched)
            return None if matched is None else matched.task_id
        started = self._try(server, request, m.TaskIds)
        return None if started is None else started.task_ids[0]

    def poll(self, task_ids: Sequence[int]) -> dict[int, Answer]:
        """As of KVTaskEngine."""
        answers, lost = self._answers(task_ids, m.Poll, 0.0)
        return answers | self._failed(lost)

    def wait(self, task_ids: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """As of KVTaskEngine."""
        deadline_s = time.monotonic() + timeout_s
        answers, lost = self._answers(task_ids, lambda ids: m.Wait(ids, timeout_s), timeout_s)
        answers |= self._failed(lost)
        while (moving := [task_id for task_id in lost if task_id not in answers]) and (
            left_s := deadline_s - time.monotonic()
        ) > 0:
            time.sleep(min(left_s, _MOVING_POLL_S))
            answers |= self._failed(moving)
        return answers | dict.fromkeys(moving, Answer(KVResponseStatus.TIMEOUT))

    def _answers(
        self, task_ids: Sequence[int], verb_of: Callable[[list[int]], m.Verb], wait_s: float
    ) -> tuple[dict[int, Answer], list[int]]:
        """(answers of misses and from the server, ids of tasks whose server is gone)."""
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
        return answers, tasks

    def _failed(self, lost: Sequence[int]) -> dict[int, Answer]:
        """Answers of those whose blocks nobody moves any more: the engine may use them for something else."""
        why = self._connection.off or f"KVServer {self._endpoint}: the one that ran the task is gone"
        return {
            task_id: Answer(KVResponseStatus.FAILED, error=why)
            for task_id in lost
            if self._connection.is_over(task_id // _GENERATION)
        }

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
        call = next(self._calls)
        request = m.encode(m.Request(server.token, call, verb))
        try:
            with server.lines.take() as sock:
                self._send(server, sock, request)
                outcome = self._receive(server, sock, call, wait_s + REPLY_TIMEOUT_S)
        except (LineError, StrangerError) as error:
            self._lose(server, str(error))
        if isinstance(outcome, expected):
            return outcome
        if isinstance(outcome, m.Failure):
            raise (ValueError if outcome.is_argument else RadixError)(outcome.error)
        raise RadixError(f"the KVServer answered {type(verb).__name__} with {type(outcome).__name__}")

    def _send(self, server: Server, sock: zmq.Socket[bytes], request: bytes) -> None:
        try:
            sock.send(request)
        except zmq.Again:  # it has not read for long
            self._lose(server, "no answer")

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
            self._lose(server, "it is gone")
        elif time.monotonic() > deadline_s:
            self._lose(server, "no answer")

    def _lose(self, server: Server, why: str) -> NoReturn:
        why = f"KVServer {self._endpoint}: {why}"
        self._connection.lost(server, why)
        raise KVServerDied(why)


def _outer(server: Server, task_id: int) -> int:
    """A task's number for the caller."""
    return server.generation * _GENERATION + task_id


def _packed(launch: Launch) -> m.LaunchMessage:
    """launch with the task's number at the server."""
    return m.pack_launch(replace(launch, task_id=launch.task_id % _GENERATION))


def _check_layerwise(server: Server | None, launches: Sequence[Launch]) -> None:
    """ValueError for a load of a server that died: no layer of it would be signalled."""
    for launch in launches:
        if not is_miss(launch.task_id) and not _is_of(server, launch.task_id):
            raise ValueError(
                f"layerwise_transfer: no layer of task {launch.task_id} will be signalled, its server is gone"
            )


def _is_of(server: Server | None, task_id: int) -> bool:
    """Whether server gave the task out."""
    return server is not None and task_id > 0 and task_id // _GENERATION == server.generation
