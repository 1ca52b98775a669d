"""One client of the KVServer: its task engine, and what its requests do with it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flexkv_radix.config import CacheConfig, SWAPoolConfig
from flexkv_radix.metrics import MetricsEndpoint
from flexkv_radix.server import messages as m
from flexkv_radix.table import Answer
from flexkv_radix.tasks import KVTaskEngine
from flexkv_radix.transfer.peers import Peer
from radixshmem import RadixError

logger = logging.getLogger(__name__)

Address = tuple[bytes, int]  # where a reply goes: ZeroMQ routing id and call number


@dataclass
class Waiter:
    """A wait() that cannot be answered yet."""

    address: Address
    running: list[int]
    answers: dict[int, Answer]
    deadline_s: float


class Desk:
    """Serves one client.  All methods run on the server's thread and return at once."""

    def __init__(
        self,
        hello: m.Hello,
        peer: Peer,
        lifeline_fd: int,
        metrics: MetricsEndpoint | None,
        wake: Callable[[], None],
    ) -> None:
        """peer, lifeline_fd: what tells of the other side (liveness.py); the desk's to close."""
        self.token = secrets.token_bytes(16)
        self.dp_client_id = hello.spec.dp_client_id
        self.pid = hello.pid
        self.peer = peer
        self._spec = hello.spec
        self._lifeline_fd = lifeline_fd
        self._engine = KVTaskEngine(
            hello.spec, on_change=wake, metrics_endpoint=metrics, lifeline_fd=lifeline_fd
        )
        self._waiters: list[Waiter] = []
        self._closing: threading.Thread | None = None
        self._engine.start()

    # -- requests

    def serve(self, address: Address, verb: m.Verb) -> m.Outcome | None:
        """The reply, or None if it comes later from due_replies()."""
        try:
            return self._wait(address, verb) if isinstance(verb, m.Wait) else self._answer(verb)
        except (RadixError, RuntimeError) as error:
            return m.Failure(str(error), is_argument=False)
        except ValueError as error:
            return m.Failure(str(error), is_argument=True)

    def _answer(self, verb: m.Verb) -> m.Outcome:
        engine = self._engine
        match verb:
            case m.Match():
                match = engine.put_match if verb.is_put else engine.get_match
                hashes, wanted = m.unpack_hashes(verb.hashes), m.unpack_blocks(verb.wanted)
                task_id, blocks = match(hashes, verb.num_tokens, wanted, swa=verb.swa)
                return m.Matched(task_id, m.pack_blocks(blocks), engine.region)
            case m.LaunchAll():
                launches = [m.unpack_launch(launch) for launch in verb.launches]
                return m.TaskIds(
                    engine.launch(
                        launches, as_batch=verb.as_batch, layerwise=verb.layerwise, counter_id=verb.counter_id
                    )
                )
            case m.Poll():
                return m.pack_answers(engine.poll(verb.task_ids))
            case m.Cancel():
                engine.cancel_all() if verb.everything else engine.cancel(verb.task_ids)
                return m.Done()
            case m.Prefetch():
                return m.TaskIds(
                    [engine.prefetch(m.unpack_hashes(verb.hashes), verb.num_tokens, swa=verb.swa)]
                )
        return self._look(verb)

    def _look(self, verb: m.Verb) -> m.Outcome:
        match verb:
            case m.State():
                return self._state()
            case m.Ring():
                return m.pack_ring(self._engine.ring_events(verb.cursor))
            case m.Present():
                return m.PresentReply(self._engine.num_present(m.unpack_hashes(verb.hashes)))
        raise RuntimeError(f"no such verb: {type(verb).__name__}")

    def _state(self) -> m.StateReply:
        config = CacheConfig(self._spec.geometry.block_size)
        if self._spec.geometry.swa_window_blocks:
            config.swa = SWAPoolConfig(1)
        is_ready = self._engine.is_ready()
        region = self._engine.adopt_into(config)
        swa_slots = config.swa.num_slots if config.swa else 0
        return m.StateReply(
            is_ready,
            self._engine.disabled,
            region,
            config.num_cpu_blocks,
            swa_slots,
            config.node_rank,
            config.num_nodes,
        )

    # -- waiting

    def _wait(self, address: Address, verb: m.Wait) -> m.Outcome | None:
        answers, running = self._engine.answers(verb.task_ids)
        if not running:
            return m.pack_answers(answers)
        self._waiters.append(Waiter(address, running, answers, time.monotonic() + verb.timeout_s))
        return None

    def next_deadline_s(self) -> float | None:
        """When the first waiter times out."""
        return min((waiter.deadline_s for waiter in self._waiters), default=None)

    def due_replies(self, now_s: float) -> list[tuple[Address, m.Outcome]]:
        """Replies to waits that are over."""
        due: list[tuple[Address, m.Outcome]] = []
        left = []
        for waiter in self._waiters:
            answers, waiter.running = self._engine.answers(waiter.running)
            waiter.answers |= answers
            if waiter.running and now_s < waiter.deadline_s:
                left.append(waiter)
                continue
            late = self._engine.wait(waiter.running, 0.0)
            due.append((waiter.address, m.pack_answers(waiter.answers | late)))
        self._waiters = left
        return due

    # -- the end

    def close(self) -> None:
        """End the client's tasks, give everything back, unmap its memory; behind the caller's back."""
        if self._closing is None:
            self.peer.close()
            self._waiters.clear()
            self._closing = threading.Thread(target=self._end, name="flexkv-close")
            self._closing.start()

    def _end(self) -> None:
        self._engine.shutdown()
        os.close(self._lifeline_fd)  # a worker that could not be stopped has its own

    @property
    def is_closed(self) -> bool:
        return self._closing is not None and not self._closing.is_alive()

    def join(self) -> None:
        """Wait until close() is through."""
        if self._closing is not None:
            self._closing.join()
