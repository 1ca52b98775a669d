"""Loads layer by layer: every layer is signalled once, to every rank, when its bytes are there."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shared_engine import DEADLINE_S, Engine, EngineRank, kv_part, open_store, scramble, start_engine

from flexkv_radix.layerwise import LayerEvents, LayerLoadFailed, build_layerwise_eventfd_socket_path
from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.transfer.protocol import OpKind, RankPlace, TransferDied
from radixshmem.geometry import ComponentType

FULL, SWA = ComponentType.FULL, ComponentType.SWA
LAYERFIRST = KVCacheLayoutType.LAYERFIRST
NUM_SLOTS, NUM_LAYERS = 29, 3


def _connect(engine: Engine, rank: int = 0, num_ranks: int = 1, num_layers: int = NUM_LAYERS) -> LayerEvents:
    events = LayerEvents(num_layers)
    events.connect(engine.config.layerwise_sockets[0].path, rank, num_ranks, DEADLINE_S)
    return events


def _layers(blocks: np.ndarray) -> np.ndarray:
    """[blocks, layers, bytes of a layer]"""
    return blocks.reshape(len(blocks), NUM_LAYERS, -1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_are_in_place_when_they_are_signalled(num_ranks: int, tmp_path: Path) -> None:
    parts = [kv_part(LAYERFIRST) for _ in range(num_ranks)]
    share = parts[0].share_bytes
    rng = np.random.default_rng(41)
    with open_store({FULL: num_ranks * share}, NUM_SLOTS) as store:
        ranks = [EngineRank(RankPlace(tp_rank=rank), [part]) for rank, part in enumerate(parts)]
        with start_engine(store, ranks, tmp_path, layerwise=True) as engine:
            events = [_connect(engine, rank, num_ranks) for rank in range(num_ranks)]
            for counter_id in (0, 1, 2, 1):
                scramble(rng, store.slots(), *(part.tensors[0] for part in parts))
                blocks, slots = rng.permutation(13)[:9], rng.permutation(NUM_SLOTS)[:9]
                for one in events:
                    one.reset(counter_id)
                op = engine.op(OpKind.H2D, blocks, slots, layerwise=True, counter_id=counter_id)
                engine.handle.submit([op])
                for layer in range(NUM_LAYERS):
                    for rank, part in enumerate(parts):
                        events[rank].wait(counter_id, layer, DEADLINE_S)
                        expected = store.slots()[slots, rank * share : (rank + 1) * share]
                        assert np.array_equal(
                            _layers(part.blocks())[blocks, layer], _layers(expected)[:, layer]
                        )
                (result,) = engine.handle.poll(DEADLINE_S)
                assert result.ok, result.error
            for one in events:
                one.close()


def test_each_component_signals_its_own_layers(tmp_path: Path) -> None:
    """A hybrid model: layers 0-2 are FULL, 3-4 SWA; an op without blocks signals at once."""
    full, swa = kv_part(LAYERFIRST), kv_part(LAYERFIRST, num_layers=2, component=SWA)
    message = EngineRank(RankPlace(), [full, swa])
    original = swa.rank_part

    def later_layers(first_storage: int):
        from dataclasses import replace

        part = original(first_storage)
        return replace(part, segments=tuple(replace(s, layer=s.layer + NUM_LAYERS) for s in part.segments))

    swa.rank_part = later_layers  # type: ignore[method-assign]
    with open_store({FULL: full.share_bytes, SWA: swa.share_bytes}, NUM_SLOTS) as store:
        with start_engine(store, [message], tmp_path, layerwise=True) as engine:
            events = _connect(engine, num_layers=5)
            (result,) = engine.run(engine.op(OpKind.H2D, [1], [2], FULL, layerwise=True))
            assert result.ok, result.error
            for layer in range(3):
                events.wait(0, layer, DEADLINE_S)
            with pytest.raises(TimeoutError):
                events.wait(0, 3, 0.0)
            (result,) = engine.run(engine.op(OpKind.H2D, [], [], SWA, layerwise=True))
            assert result.ok, result.error
            for layer in (3, 4):
                events.wait(0, layer, DEADLINE_S)
            events.close()


@pytest.fixture
def engine(tmp_path: Path):
    part = kv_part(LAYERFIRST)
    with open_store({FULL: part.share_bytes}, NUM_SLOTS) as store:
        with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path, layerwise=True) as engine:
            yield engine


def test_the_wire_is_what_engines_speak(engine: Engine) -> None:
    """Raw: 16 bytes, one message per counter with the layers' eventfds beside it, 1 byte back, closed."""
    fds = [[os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK) for _ in range(NUM_LAYERS)] for _ in range(3)]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(engine.config.layerwise_sockets[0].path)
        sock.sendall(struct.pack("iiii", 0, 1, NUM_LAYERS, 3))
        for counter_id in range(3):
            rights = array.array("i", fds[counter_id])
            sock.sendmsg([struct.pack("i", counter_id)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        sock.settimeout(DEADLINE_S)
        assert sock.recv(1) == b"\x01"
    (result,) = engine.run(engine.op(OpKind.H2D, [1], [2], layerwise=True, counter_id=2))
    assert result.ok, result.error
    for layer in range(NUM_LAYERS):
        assert select.select([fds[2][layer]], [], [], DEADLINE_S)[0]
        assert os.eventfd_read(fds[2][layer]) == 1
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fds[2][layer])
    for fd in (fd for counter in fds for fd in counter):
        os.close(fd)


def test_a_failed_load_is_told_and_the_next_one_works(engine: Engine) -> None:
    events = _connect(engine)
    events.reset(1)
    (result,) = engine.run(engine.op(OpKind.H2D, [99], [0], layerwise=True, counter_id=1))
    assert not result.ok
    with pytest.raises(LayerLoadFailed):
        events.wait(1, 0, DEADLINE_S)
    events.reset(1)
    assert engine.run(engine.op(OpKind.H2D, [1], [0], layerwise=True, counter_id=1))[0].ok
    events.wait(1, 0, DEADLINE_S)
    events.close()


def test_a_dead_worker_ends_the_wait(engine: Engine) -> None:
    events = _connect(engine)
    os.kill(engine.handle.pid, signal.SIGKILL)
    with pytest.raises(TransferDied):
        events.wait(0, 0, DEADLINE_S)
    events.close()


def test_loads_that_cannot_be_signalled_are_refused(engine: Engine) -> None:
    (result,) = engine.run(engine.op(OpKind.H2D, [1], [0], layerwise=True))
    assert "sent no eventfds" in result.error
    events = _connect(engine, num_layers=NUM_LAYERS - 1)
    (result,) = engine.run(engine.op(OpKind.H2D, [1], [0], layerwise=True))
    assert "sent 2 eventfds for 3 layers" in result.error
    events.close()
    events = _connect(engine)  # in place of the earlier ones
    few, good = engine.run(
        engine.op(OpKind.H2D, [1], [0], layerwise=True, counter_id=3),
        engine.op(OpKind.H2D, [1], [0], layerwise=True),
    )
    assert "counter_id: 3 given" in few.error
    assert good.ok, good.error
    events.close()


@pytest.mark.parametrize(
    "data", [b"", b"short", struct.pack("iiii", 5, 2, 3, 3), struct.pack("iiii", 0, 1, -1, 3)]
)
def test_a_broken_handshake_harms_nobody(data: bytes, engine: Engine) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(engine.config.layerwise_sockets[0].path)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(DEADLINE_S)
        assert sock.recv(1) == b""
    assert engine.run(engine.op(OpKind.H2D, [1], [0]))[0].ok


def test_socket_paths_tell_stages_and_clients_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_LAYERWISE_EVENTFD_SOCKET", "/run/fd.sock")
    paths = {
        (1, 1): "/run/fd.sock",
        (2, 1): "/run/fd.sock_pp1",
        (1, 4): "/run/fd.sock_dp3",
        (2, 4): "/run/fd.sock_pp1_dp3",
    }
    for (pp_size, dp_size), path in paths.items():
        config = SimpleNamespace(pp_size=pp_size, dp_size=dp_size)
        assert build_layerwise_eventfd_socket_path(3, 1, config) == path
    monkeypatch.delenv("FLEXKV_LAYERWISE_EVENTFD_SOCKET")
    default = build_layerwise_eventfd_socket_path(0, 0, SimpleNamespace())
    assert default == "/tmp/flexkv_layerwise_eventfd.sock"
