"""The wire format of KV events, read back through real sockets."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from flexkv_radix import AllBlocksCleared, BlockRemoved, BlockStored
from flexkv_radix.kv_events import END_SEQUENCE, ZmqEventPublisher

STORED = BlockStored([2**64 - 1, 7], None, [1, 2, 3, 4], 2)
REMOVED = BlockRemoved([7])


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        context.setsockopt(zmq.RCVTIMEO, 10_000)
        yield context


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    with ZmqEventPublisher(
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", dp_rank=3, kept_batches=3
    ) as publisher:
        yield publisher


def replay(context: zmq.Context[Any], publisher: ZmqEventPublisher, first: int) -> list[list[bytes]]:
    """Batches that the publisher still has, from number first on."""
    with context.socket(zmq.DEALER) as request:
        request.connect(publisher.replay_endpoint)
        request.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while (batch := request.recv_multipart()[1:])[1] != END_SEQUENCE:
            batches.append(batch)
        assert batch == [b"", END_SEQUENCE, b""]
        return batches


def test_subscribers_get_numbered_batches(context: zmq.Context[Any], publisher: ZmqEventPublisher) -> None:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.connect(publisher.endpoint)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 100)
        first = None
        while first is None:  # until the subscription has arrived at the publisher
            publisher([REMOVED])
            try:
                first = subscriber.recv_multipart()
            except zmq.Again:
                continue
        subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
        publisher([STORED, REMOVED, AllBlocksCleared()])
        topic, sequence, payload = subscriber.recv_multipart()
    assert topic == b"kv"
    assert int.from_bytes(sequence, "big") == int.from_bytes(first[1], "big") + 1
    seconds, events, dp_rank = msgspec.msgpack.decode(payload)
    assert dp_rank == 3
    assert seconds > 1.7e9
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1, 7],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_replay_of_what_is_kept(context: zmq.Context[Any], publisher: ZmqEventPublisher) -> None:
    for number in range(5):
        publisher([BlockRemoved([number])])
    batches = replay(context, publisher, 0)
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in batches] == [2, 3, 4]
    assert [msgspec.msgpack.decode(payload)[1][0]["block_hashes"] for *_, payload in batches] == [
        [2],
        [3],
        [4],
    ]
    assert [sequence for _, sequence, _ in replay(context, publisher, 4)] == [(4).to_bytes(8, "big")]
    assert replay(context, publisher, 99) == []


def test_a_request_that_is_none_is_not_answered(
    context: zmq.Context[Any], publisher: ZmqEventPublisher
) -> None:
    publisher([REMOVED])
    with context.socket(zmq.DEALER) as peer:
        peer.connect(publisher.replay_endpoint)
        peer.send_multipart([b"", b"what?"])
        peer.send_multipart([b"", (0).to_bytes(8, "big")])
        assert len(peer.recv_multipart()) == 4  # the answer to the second


def test_ports_are_raised_by_the_rank() -> None:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ZmqEventPublisher(f"tcp://127.0.0.1:{port - 2}", dp_rank=2) as publisher:
        assert publisher.endpoint == f"tcp://127.0.0.1:{port}"


def test_an_endpoint_in_use_is_refused(publisher: ZmqEventPublisher) -> None:
    with pytest.raises(zmq.ZMQError, match="in use"):
        ZmqEventPublisher(publisher.endpoint)
