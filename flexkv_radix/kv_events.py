"""Publishes KV events as vLLM does, so that its subscribers (Dynamo, llm-d) hear of the shared tier.

    PUB      [topic, sequence: 8 bytes big-endian, payload]
    ROUTER   replay: [first sequence: 8 bytes] -> the batches from there on that are still kept, each as
             [topic, sequence, payload], then [b"", -1, b""]
    payload  MessagePack [seconds since 1970, [events], data-parallel rank], an event a map with its "type"

For engines without a publisher of their own: `KVManager(..., event_collector=ZmqEventPublisher(endpoint))`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import asdict
from types import TracebackType

import msgspec
import zmq

from flexkv_radix.events import BlockStored, KVEvent

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
_MAX_KEPT_BATCHES = 10_000
_SEND_LIMIT = 100_000  # messages that wait for a slow subscriber before it loses some


class ZmqEventPublisher:
    """An EventCollector.  Endpoints are bound, tcp ports raised by dp_rank; `*` and port 0 are allowed.

    Subscribers that miss a sequence number ask at replay_endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        dp_rank: int = 0,
        kept_batches: int = _MAX_KEPT_BATCHES,
    ) -> None:
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=kept_batches)
        self._waiting: deque[list[KVEvent]] = deque()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(_SEND_LIMIT)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = _bind(self._publisher, endpoint, dp_rank)
            self.replay_endpoint = _bind(self._replay, replay_endpoint, dp_rank) if replay_endpoint else ""
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._num_sent = 0
        self._stop = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    def __call__(self, events: list[KVEvent]) -> None:
        """Publish one batch; from any thread, returns at once."""
        self._waiting.append(events)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what waits, then stop.  A second call does nothing."""
        if self._stop:
            return
        self._stop = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def __enter__(self) -> ZmqEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._stop or self._waiting:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._waiting:
                self._send(self._waiting.popleft())
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
        self._context.destroy(linger=1000)

    def _send(self, events: list[KVEvent]) -> None:
        payload = msgspec.msgpack.encode([time.time(), [_as_map(event) for event in events], self._dp_rank])
        sequence = self._num_sent.to_bytes(8, "big")
        self._publisher.send_multipart([self._topic, sequence, payload])
        self._kept.append((sequence, payload))
        self._num_sent += 1

    def _answer(self, request: list[bytes]) -> None:
        """Replay; what is no request for one gets no answer."""
        if len(request) != 3 or len(request[2]) != 8:
            return
        peer, delimiter, first = request
        for sequence, payload in self._kept:
            if sequence >= first:
                self._replay.send_multipart([peer, delimiter, self._topic, sequence, payload])
        self._replay.send_multipart([peer, delimiter, b"", END_SEQUENCE, b""])


def _as_map(event: KVEvent) -> dict[str, object]:
    fields: dict[str, object] = {"type": type(event).__name__, **asdict(event)}
    if isinstance(event, BlockStored):
        fields["lora_name"] = None  # vLLM's subscribers require it
    return fields


def _bind(socket: zmq.Socket[bytes], endpoint: str, dp_rank: int) -> str:
    """Bind and return the endpoint that came of it."""
    scheme, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit() and int(port) and dp_rank:
        endpoint = f"{scheme}:{int(port) + dp_rank}"
    socket.bind(endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
