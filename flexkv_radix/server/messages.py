"""What KVManagers and the KVServer say to each other: MessagePack over ZeroMQ, never pickle.

    Request   DEALER -> ROUTER     the client's token, a call number, a verb
    Reply     ROUTER -> DEALER     the call number, what the verb gave

The token is what the client was given over its liveness socket; so one client may use several sockets,
one a thread.  Arrays travel as their bytes.
"""

from __future__ import annotations

import msgspec
import numpy as np

from flexkv_radix.launching import Launch
from flexkv_radix.lifecycle import Member
from flexkv_radix.planner import Blocks
from flexkv_radix.responses import KVResponseStatus
from flexkv_radix.ring import Hashes, RingEvents
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Answer


class Hello(msgspec.Struct, tag=True, array_like=True):
    """client -> server on the liveness socket: who it is and what engine it wants."""

    spec: EngineSpec
    pid: int


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """server -> client on the liveness socket.  error: why not; try_again: it may pass by itself."""

    token: bytes
    error: str = ""
    try_again: bool = False


class BlocksMessage(msgspec.Struct, array_like=True):
    start: int
    end: int
    ids: bytes | None


class MemberMessage(msgspec.Struct, array_like=True):
    num_tokens: int
    blocks: BlocksMessage


class AnswerMessage(msgspec.Struct, array_like=True):
    status: KVResponseStatus
    members: list[MemberMessage]
    error: str


class LaunchMessage(msgspec.Struct, array_like=True):
    task_id: int
    gpu_blocks: bytes
    swa_blocks: bytes | None


class Match(msgspec.Struct, tag=True, array_like=True):
    is_put: bool
    hashes: bytes
    num_tokens: int
    wanted: BlocksMessage
    swa: bool


class Prefetch(msgspec.Struct, tag=True, array_like=True):
    hashes: bytes
    num_tokens: int
    swa: bool


class LaunchAll(msgspec.Struct, tag=True, array_like=True):
    launches: list[LaunchMessage]
    as_batch: bool
    layerwise: bool
    counter_id: int


class Poll(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]


class Wait(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]
    timeout_s: float


class Cancel(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]
    everything: bool = False


class State(msgspec.Struct, tag=True, array_like=True):
    """Asks whether the engine is ready."""


class Ring(msgspec.Struct, tag=True, array_like=True):
    cursor: int


class Present(msgspec.Struct, tag=True, array_like=True):
    hashes: bytes


Verb = Match | Prefetch | LaunchAll | Poll | Wait | Cancel | State | Ring | Present


class Request(msgspec.Struct, array_like=True):
    token: bytes
    call: int
    verb: Verb


class _Numbered(msgspec.Struct, array_like=True):
    """The start of a Request."""

    token: bytes
    call: int


class Matched(msgspec.Struct, tag=True, array_like=True):
    task_id: int
    blocks: BlocksMessage
    region: str = ""


class TaskIds(msgspec.Struct, tag=True, array_like=True):
    task_ids: list[int]


class Answers(msgspec.Struct, tag=True, array_like=True):
    answers: dict[int, AnswerMessage]


class StateReply(msgspec.Struct, tag=True, array_like=True):
    """region: from which the engine is served, "" while it is not; the counts are that one's."""

    is_ready: bool
    disabled: str
    region: str = ""
    num_cpu_blocks: int = 0
    num_swa_slots: int = 0
    node_rank: int = 0
    num_nodes: int = 1


class RingReply(msgspec.Struct, tag=True, array_like=True):
    """exists: whether the region keeps events."""

    exists: bool
    cursor: int = 0
    kinds: bytes = b""
    hashes: bytes = b""
    overflow: bool = False


class PresentReply(msgspec.Struct, tag=True, array_like=True):
    num_blocks: int


class Failure(msgspec.Struct, tag=True, array_like=True):
    """The verb raised.  is_argument: a ValueError about what the caller gave."""

    error: str
    is_argument: bool


class Done(msgspec.Struct, tag=True, array_like=True):
    """The verb has nothing to tell."""


Outcome = Matched | TaskIds | Answers | StateReply | RingReply | PresentReply | Failure | Done


class Reply(msgspec.Struct, array_like=True):
    call: int
    outcome: Outcome


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_numbered = msgspec.msgpack.Decoder(_Numbered).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_greeting = msgspec.msgpack.Decoder(Hello | Welcome).decode


def call_of(data: bytes) -> int | None:
    """The call number of what is no whole Request, if it can be told."""
    try:
        return _decode_numbered(data).call
    except (msgspec.MsgspecError, RecursionError):
        return None


def pack_hashes(hashes: Hashes) -> bytes:
    return hashes.tobytes()


def unpack_hashes(data: bytes) -> Hashes:
    return np.frombuffer(data, dtype=np.uint64)


def pack_blocks(blocks: Blocks) -> BlocksMessage:
    return BlocksMessage(blocks.start, blocks.end, None if blocks.ids is None else blocks.ids.tobytes())


def unpack_blocks(message: BlocksMessage) -> Blocks:
    ids = None if message.ids is None else np.frombuffer(message.ids, dtype=np.int64)
    return Blocks(message.start, message.end, ids)


def pack_launch(launch: Launch) -> LaunchMessage:
    swa = None if launch.swa_blocks is None else launch.swa_blocks.tobytes()
    return LaunchMessage(launch.task_id, launch.gpu_blocks.tobytes(), swa)


def unpack_launch(message: LaunchMessage) -> Launch:
    swa = None if message.swa_blocks is None else np.frombuffer(message.swa_blocks, dtype=np.int64)
    return Launch(message.task_id, np.frombuffer(message.gpu_blocks, dtype=np.int64), swa)


def pack_answers(answers: dict[int, Answer]) -> Answers:
    return Answers(
        {
            task_id: AnswerMessage(
                answer.status,
                [MemberMessage(member.num_tokens, pack_blocks(member.blocks)) for member in answer.members],
                answer.error,
            )
            for task_id, answer in answers.items()
        }
    )


def unpack_answers(message: Answers) -> dict[int, Answer]:
    return {
        task_id: Answer(
            answer.status,
            tuple(Member(member.num_tokens, unpack_blocks(member.blocks)) for member in answer.members),
            answer.error,
        )
        for task_id, answer in message.answers.items()
    }


def pack_ring(events: RingEvents | None) -> RingReply:
    if events is None:
        return RingReply(exists=False)
    return RingReply(True, events.cursor, events.kinds.tobytes(), pack_hashes(events.hashes), events.overflow)


def unpack_ring(message: RingReply) -> RingEvents | None:
    if not message.exists:
        return None
    kinds = np.frombuffer(message.kinds, dtype=np.int8)
    return RingEvents(message.cursor, kinds, unpack_hashes(message.hashes), message.overflow)
