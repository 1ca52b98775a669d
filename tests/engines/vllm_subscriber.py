"""A subscriber to KV events that a test drives (engine_protocol.py); it reads them with vLLM's own types.

A batch is told as [sequence, rank, [events]], an event as {"type": ..., fields}.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from engine_protocol import serve
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

TIMEOUT_MS = 60_000
DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)


def received(socket: zmq.Socket) -> list[bytes]:
    """One message; TimeoutError if none comes."""
    if not socket.poll(TIMEOUT_MS):
        raise TimeoutError("no message")
    return list(socket.recv_multipart())


def decoded(sequence: bytes, payload: bytes) -> list[Any]:
    batch = DECODER.decode(payload)
    return [int.from_bytes(sequence, "big"), batch.data_parallel_rank, msgspec.to_builtins(batch.events)]


def replay(endpoint: str) -> list[list[Any]]:
    """All batches that the publisher keeps."""
    batches = []
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, _, sequence, payload = received(socket)
            if sequence == ZmqEventPublisher.END_SEQ:
                return batches
            batches.append(decoded(sequence, payload))


def start(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    live = zmq.Context.instance().socket(zmq.SUB)

    def subscribe(endpoint: str) -> None:
        """What is published before the subscription has arrived at the publisher is not heard."""
        live.connect(endpoint)
        live.subscribe(b"")

    def hears(timeout_ms: int) -> bool:
        """Whether a batch is there to be heard, after some time at most."""
        return bool(live.poll(timeout_ms))

    def hear(last: int) -> list[list[Any]]:
        """The next batches, up to that of the sequence number last."""
        batches = [decoded(*received(live)[1:])]
        while batches[-1][0] < last:
            batches.append(decoded(*received(live)[1:]))
        return batches

    return {"replay": replay, "subscribe": subscribe, "hears": hears, "hear": hear}


if __name__ == "__main__":
    serve(start)
