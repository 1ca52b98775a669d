"""What an engine may ask of its cache in process it may ask of a KVServer, however that came to be."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, small_model, tokens_of
from engine_process import EngineProcess
from kv_server import EMBEDDED, EXTERNAL
from node import Node

from flexkv_radix import BlockStored, CacheConfig, KVResponseStatus, expected_geometry
from flexkv_radix.layerwise import LayerEvents
from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from flexkv_radix.server.server import KVServer
from flexkv_radix.server.spawn import is_served
from flexkv_radix.spec import EngineSpec
from flexkv_radix.transfer.wire import send_fds
from radixshmem import Geometry

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES


def test_client_mode_is_the_embedded_server(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ={"FLEXKV_SERVER_CLIENT_MODE": "1"}).wait_ready() as engine:
        assert is_served(f"ipc://{tmp_path}/flexkv")
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
        with EngineProcess(name, tmp_path, 1, **EMBEDDED) as other:
            other.ask("ready")
            assert other.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_strict_raises_the_refusal(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=1 << 20)
    node.join(name, Geometry(32, 2 * SMALL_SLOT_BYTES))
    with (
        small_engine(name, tmp_path, environ={**EXTERNAL, "FLEXKV_STRICT": "1"}) as engine,
        pytest.raises(RuntimeError, match="block_size"),
    ):
        engine.wait_ready()


def test_a_load_signals_its_layers(node: Node, tmp_path: Path, server) -> None:
    path = str(tmp_path / "eventfds")
    layerwise = {"FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1", "FLEXKV_LAYERWISE_EVENTFD_SOCKET": path}
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ={**EXTERNAL, **layerwise}).wait_ready() as engine:
        events = LayerEvents(2)
        events.connect(path, 0, 1, timeout_s=20)
        engine.put(PROMPT, HERE)
        for counter_id in (0, 2):
            events.reset(counter_id)
            task, _ = engine.manager.get_match(PROMPT)
            engine.manager.launch(
                [task], [engine.slots(THERE)], layerwise_transfer=True, counter_id=counter_id
            )
            for layer in range(2):
                events.wait(counter_id, layer, timeout_s=20)
            assert engine.wrong_blocks(PROMPT, THERE) == []
            engine.expect(task, KVResponseStatus.SUCCESS)
        events.close()


def test_events_of_what_was_stored(node: Node, tmp_path: Path, server) -> None:
    events: list[Any] = []
    name = node.serve(data_bytes=DATA_BYTES, kvevent_ring_capacity=1024)
    with small_engine(name, tmp_path, environ=EXTERNAL, event_collector=events.extend).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        eventually(lambda: len(stored(events)) == 5, lambda: str(events))
        assert stored(events) == engine.hashes(PROMPT).tolist()


def stored(events: list[Any]) -> list[int]:
    return [hash_ for event in events if isinstance(event, BlockStored) for hash_ in event.block_hashes]


def test_a_client_that_leaves_before_it_is_welcomed(node: Node, tmp_path: Path) -> None:
    """Its id is free for the next, and the server ends as it should."""
    endpoint, name = f"ipc://{tmp_path}/flexkv", node.serve(data_bytes=DATA_BYTES)
    server = KVServer(endpoint)
    spec = EngineSpec(name, expected_geometry(small_model(), CacheConfig(BLOCK)), 1, f"{tmp_path}/register")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(liveness.liveness_path(endpoint))
        liveness.send(sock, m.Hello(spec, os.getpid()))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_fds(sock, [theirs.fileno()])
    server.start()
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        assert engine.manager.disabled == ""
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
    server.stop()
    assert not is_served(endpoint)


@pytest.mark.parametrize("mode", [{}, EXTERNAL], ids=["in process", "KVServer"])
def test_instances_on_one_endpoint(node: Node, tmp_path: Path, server, mode: dict[str, str]) -> None:
    """FLEXKV_INSTANCE_ID alone sets them apart: where ranks register, and at the KVServer."""
    name = node.serve(data_bytes=DATA_BYTES)
    first, second = ({**mode, "FLEXKV_INSTANCE_NUM": "2", "FLEXKV_INSTANCE_ID": str(id_)} for id_ in range(2))
    with EngineProcess(name, tmp_path, **first) as a, EngineProcess(name, tmp_path, **second) as b:
        a.ask("ready"), b.ask("ready")
        assert a.ask("put", PROMPT, HERE) == 5 * BLOCK
        assert b.ask("get", PROMPT, THERE) == 5 * BLOCK
        assert (a.ask("disabled"), b.ask("disabled")) == ("", "")
