"""Bad ops, bad registrations, and deaths: an error with its cause, never a wrong byte, never a hang."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import termios
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shared_engine import (
    DEADLINE_S,
    EngineRank,
    kv_part,
    lease_file,
    open_store,
    scramble,
    start_engine,
    stop_rank,
    wait_for,
)

from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import (
    Message,
    OpKind,
    RankPlace,
    Registered,
    Stop,
    TransferConfig,
    TransferDied,
    TransferOp,
    encode,
)
from flexkv_radix.transfer.registration import register_rank
from flexkv_radix.transfer.wire import connect
from radixshmem.geometry import ComponentType

FULL, SWA = ComponentType.FULL, ComponentType.SWA
LAYERFIRST = KVCacheLayoutType.LAYERFIRST
NUM_SLOTS = 29
NUM_BLOCKS = 13


@pytest.fixture
def part():
    return kv_part(LAYERFIRST, num_blocks=NUM_BLOCKS)


@pytest.fixture
def store(part):
    with open_store({FULL: part.share_bytes, SWA: 64}, NUM_SLOTS) as store:
        yield store


@pytest.fixture
def engine(part, store, tmp_path):
    with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path) as engine:
        yield engine


BAD_IDS = {
    "block too large": ([0, NUM_BLOCKS], [0, 1], f"gpu_blocks: 0..{NUM_BLOCKS} asked for"),
    "block negative": ([-1, 0], [0, 1], "gpu_blocks: -1..0 asked for"),
    "slot too large": ([0, 1], [5, NUM_SLOTS], f"slots: 5..{NUM_SLOTS} asked for"),
    "slot negative": ([0, 1], [-2, 5], "slots: -2..5 asked for"),
}


@pytest.mark.parametrize("kind", list(OpKind))
@pytest.mark.parametrize("name", BAD_IDS)
def test_a_bad_index_writes_nothing(name: str, kind: OpKind, engine, part) -> None:
    blocks, slots, text = BAD_IDS[name]
    scramble(np.random.default_rng(1), engine.store.bytes, *part.tensors)
    before = engine.store.bytes.copy(), part.blocks()
    (result,) = engine.run(engine.op(kind, blocks, slots))
    assert not result.ok
    assert text in result.error
    assert np.array_equal(engine.store.bytes, before[0])
    assert np.array_equal(part.blocks(), before[1])


def test_other_bad_ops_fail_with_their_cause(engine) -> None:
    twice, no_tensors, no_pool, no_eventfds = engine.run(
        engine.op(OpKind.D2H, [0, 1], [4, 4]),
        engine.op(OpKind.D2H, [0], [0], SWA),
        engine.op(OpKind.H2D, [0], [0], ComponentType.MAMBA),
        engine.op(OpKind.H2D, [0], [0], layerwise=True),
    )
    assert "named twice" in twice.error
    assert "no rank registered SWA" in no_tensors.error
    assert "no MAMBA pool" in no_pool.error
    assert "sent no eventfds" in no_eventfds.error
    assert not any(result.ok for result in (twice, no_tensors, no_pool, no_eventfds))


def test_a_failed_op_leaves_its_neighbours_alone(engine, part) -> None:
    scramble(np.random.default_rng(2), *part.tensors)
    good, bad, also_good = engine.run(
        engine.op(OpKind.D2H, [1], [1]), engine.op(OpKind.D2H, [99], [2]), engine.op(OpKind.D2H, [3], [3])
    )
    assert (good.ok, bad.ok, also_good.ok) == (True, False, True)
    assert np.array_equal(engine.store.slots()[3], part.block(3))


def test_malformed_ops_are_refused_where_they_are_made() -> None:
    blocks, slots = np.arange(2), np.arange(2, dtype=np.int32)
    with pytest.raises(TypeError, match="slots: 1-D int32 expected, not 1-D int64"):
        TransferOp(0, OpKind.H2D, FULL, blocks, blocks)
    with pytest.raises(ValueError, match="slots: 1 given for 2 gpu_blocks"):
        TransferOp(0, OpKind.H2D, FULL, blocks, slots[:1])
    with pytest.raises(ValueError, match="only loads"):
        TransferOp(0, OpKind.D2H, FULL, blocks, slots, layerwise=True)


def test_tensor_parallel_op_fails_as_a_whole_if_one_rank_lacks_the_block(tmp_path) -> None:
    parts = [kv_part(LAYERFIRST, num_blocks=NUM_BLOCKS), kv_part(LAYERFIRST, num_blocks=5)]
    with open_store({FULL: 2 * parts[0].share_bytes}, NUM_SLOTS) as store:
        ranks = [EngineRank(RankPlace(tp_rank=rank), [part]) for rank, part in enumerate(parts)]
        with start_engine(store, ranks, tmp_path) as engine:
            scramble(np.random.default_rng(3), *parts[0].tensors)
            (result,) = engine.run(engine.op(OpKind.D2H, [7], [0]))
            assert not result.ok
            assert not store.slots().any()


def test_a_rank_that_left_fails_ops_until_it_is_back(part, store, tmp_path) -> None:
    with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path, spawn=True) as engine:
        stop_rank(engine.processes[0])
        wait_for(lambda: not engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok, "failure")
        (result,) = engine.run(engine.op(OpKind.D2H, [0], [0]))
        assert "is gone" in result.error
        engine.processes[0] = engine.ranks[0].spawn(engine.config.register_endpoint)
        wait_for(lambda: engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok, "recovery")


def test_a_killed_rank_is_gone_though_its_child_lives(part, store, tmp_path) -> None:
    """The child has a copy of the registration's socket."""
    with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path, spawn=True) as engine:
        stop_rank(engine.processes[0])
        wait_for(lambda: not engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok, "failure")
        rank = engine.processes[0] = engine.ranks[0].spawn(engine.config.register_endpoint, "fork")
        wait_for(lambda: engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok, "recovery")
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
        wait_for(lambda: bool(children.read_text()), "a child")
        child = int(children.read_text())
        rank.kill()
        rank.wait()
        wait_for(lambda: not engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok, "failure", 2.0)
        os.kill(child, 0)


def test_a_killed_worker_is_noticed(engine) -> None:
    op = engine.op(OpKind.D2H, [0], [0])
    engine.run(op)
    os.kill(engine.handle.pid, signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(TransferDied, match="ended with status -9"):
        engine.handle.poll(DEADLINE_S)
    with pytest.raises(TransferDied):
        engine.handle.submit([op])
    assert time.monotonic() - started_s < 5


def test_results_before_the_death_are_not_lost(engine) -> None:
    """What the worker reported before it died is returned before TransferDied is raised."""
    op = engine.op(OpKind.D2H, [1], [1])
    engine.handle.submit([op])
    readable, _, _ = select.select([engine.handle], [], [], DEADLINE_S)
    assert readable
    os.kill(engine.handle.pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{engine.handle.pid}").exists(), "the worker's end")
    assert [result.op_id for result in engine.handle.poll()] == [op.op_id]
    with pytest.raises(TransferDied):
        engine.handle.poll(DEADLINE_S)


def _handle(at, tmp_path: Path, **changes) -> TransferHandle:
    config = replace(TransferConfig(at.spec, 1, f"{tmp_path}/register"), **changes)
    handle = TransferHandle(config, lease_fd=(fd := lease_file()))
    handle.start()
    os.close(fd)
    return handle


def _start_error(handle: TransferHandle) -> str:
    with pytest.raises(RuntimeError) as raised:
        wait_for(handle.is_ready, "failure")
    with pytest.raises(RuntimeError, match="start-up failed"):
        handle.is_ready()
    handle.shutdown()
    return str(raised.value)


def test_start_up_errors_carry_the_workers_text(store, tmp_path) -> None:
    missing = replace(store.spec, path="/dev/shm/t_transfer_missing")
    assert "t_transfer_missing" in _start_error(_handle(store, tmp_path, store=missing))
    assert "carries file descriptors" in _start_error(
        _handle(store, tmp_path, register_endpoint="tcp://127.0.0.1:1")
    )
    pools = (replace(store.spec.pools[0], num_slots=10**6),)
    beyond = replace(store.spec, pools=pools)
    assert "FULL pool ends at byte" in _start_error(_handle(store, tmp_path, store=beyond))


def test_two_workers_do_not_share_an_endpoint(engine, store, tmp_path) -> None:
    assert "another transfer worker" in _start_error(_handle(store, tmp_path))


def test_submit_before_ready_is_refused(store, tmp_path) -> None:
    handle = _handle(store, tmp_path)
    assert not handle.is_ready()
    with pytest.raises(RuntimeError, match="not ready"):
        handle.submit([])
    handle.shutdown()


def _refusal(store, tmp_path: Path, rank: EngineRank, **changes) -> tuple[str, str]:
    """What the rank and the engine are told about a registration that the worker refuses."""
    handle = _handle(store, tmp_path)
    message = replace(rank.message(), **changes)
    try:
        register_rank(f"{tmp_path}/register", message, rank.fds, timeout_s=DEADLINE_S).close()
        told = ""
    except RuntimeError as error:
        told = str(error)
    return told, _start_error(handle)


def test_bad_registrations_are_refused_with_their_cause(store, part, tmp_path) -> None:
    rank = EngineRank(RankPlace(), [part])
    storages = rank.message().storages
    told, engine_told = _refusal(store, tmp_path, rank, storages=(replace(storages[0], num_bytes=10**9),))
    assert "bytes, 1000000000 are needed" in told
    assert told.split(": ", 3)[-1] in engine_told

    rank_part = rank.message().parts[0]
    segments = rank_part.segments
    outside = replace(segments[0], base_bytes=part.tensors[0].size)
    _, engine_told = _refusal(
        store, tmp_path, rank, parts=(replace(rank_part, segments=(outside, *segments[1:])),)
    )
    assert "of a tensor of" in engine_told

    _, engine_told = _refusal(store, tmp_path, rank, parts=(replace(rank_part, segments=segments[1:]),))
    assert "written by no rank" in engine_told

    short = replace(rank_part, tensors=(replace(rank_part.tensors[0], offset_bytes=64),))
    told, _ = _refusal(store, tmp_path, rank, parts=(short,))
    assert "exceeds its storage" in told


def _framed(message: Message) -> bytes:
    payload = encode(message)
    return len(payload).to_bytes(4, "little") + payload


NONSENSE = {
    "nothing": b"",
    "half a length": b"\x03",
    "too long": b"\xff" * 100,
    "no MessagePack": b"\x05\0\0\0hello",
    "another message": _framed(Stop()),
    "the worker's own": _framed(Registered("")),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_on_the_registration_socket_harms_nobody(name: str, engine) -> None:
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as sock:
        for one in (silent, sock):
            one.connect(engine.config.register_endpoint.removeprefix("ipc://"))
        sock.sendall(NONSENSE[name])
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
            assert sock.recv(1) == b""
        assert engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok


@pytest.mark.parametrize("where", ["registration", "eventfds"])
def test_a_slow_introduction_holds_up_no_op(where: str, part, store, tmp_path) -> None:
    with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path, layerwise=True) as engine:
        path = engine.config.register_endpoint
        if where == "eventfds":
            path = engine.config.layerwise_sockets[0].path
        with connect(path, 1.0) as slow:
            slow.sendall(b"\x10")
            wait_for(lambda: num_unread_bytes(slow) == 0, "that the byte is read")
            started_s = time.monotonic()
            assert engine.run(engine.op(OpKind.D2H, [0], [0]))[0].ok
            assert time.monotonic() - started_s < 5


def num_unread_bytes(sock: socket.socket) -> int:
    """Sent, and not read by the other side."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]


def test_device_marks_are_asked_for_by_cuda_ranks_only(engine) -> None:
    """No CPU transfer makes the client's slots wait out a quarantine when it dies."""
    marked = []
    handle = TransferHandle(engine.config, lease_fd=0, mark_device=lambda: marked.append(1))
    assert marked == []
    assert handle.pid is None
