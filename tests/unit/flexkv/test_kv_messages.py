"""What crosses to the KVServer and back is what was meant."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv_radix.launching import Launch
from flexkv_radix.lifecycle import Member
from flexkv_radix.planner import Blocks
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.ring import RingEvents
from flexkv_radix.server import messages as m
from flexkv_radix.server.liveness import liveness_path
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Answer
from flexkv_radix.transfer.protocol import LayerwiseSocket
from radixshmem import Geometry


def test_hello() -> None:
    spec = EngineSpec(
        "/x", Geometry(16, 4096, fingerprint="f"), 2, "/tmp/r", layerwise_sockets=(LayerwiseSocket("/s", 1),)
    )
    assert m.decode_greeting(m.encode(m.Hello(spec, 7))) == m.Hello(spec, 7)


@pytest.mark.parametrize("blocks", [Blocks(3, 9), Blocks.of(np.array([1, 4, 6]))])
def test_blocks(blocks: Blocks) -> None:
    back = m.unpack_blocks(m.pack_blocks(blocks))
    assert (back.start, back.end, len(back)) == (blocks.start, blocks.end, len(blocks))
    assert (back.ids is None) == (blocks.ids is None)


def test_launch_with_and_without_window() -> None:
    for swa in (None, np.arange(2)):
        back = m.unpack_launch(m.pack_launch(Launch(5, np.arange(3), swa)))
        assert (back.task_id, back.gpu_blocks.tolist()) == (5, [0, 1, 2])
        assert (back.swa_blocks is None) == (swa is None)


def test_answers() -> None:
    answers = {
        3: Answer(KVResponseStatus.SUCCESS, (Member(40, Blocks(0, 2)), Member(8, Blocks(1, 1)))),
        9: Answer(KVResponseStatus.FAILED, (), "why"),
    }
    reply = m.decode_reply(m.encode(m.Reply(5, m.pack_answers(answers))))
    assert reply.call == 5
    assert isinstance(reply.outcome, m.Answers)
    assert m.unpack_answers(reply.outcome) == answers


def test_ring() -> None:
    assert m.unpack_ring(m.pack_ring(None)) is None
    events = RingEvents(8, np.array([1, -1, 0], np.int8), np.array([1 << 63, 2, 0], np.uint64), True)
    back = m.unpack_ring(m.pack_ring(events))
    assert (back.cursor, back.kinds.tolist(), back.hashes.tolist(), back.overflow) == (
        8,
        [1, -1, 0],
        [1 << 63, 2, 0],
        True,
    )


@pytest.mark.parametrize("endpoint", ["tcp://1.2.3.4:5", "ipc://relative", "/path", ""])
def test_only_unix_endpoints(endpoint: str) -> None:
    with pytest.raises(ValueError, match="FLEXKV_SERVER_RECV_PORT"):
        liveness_path(endpoint)
