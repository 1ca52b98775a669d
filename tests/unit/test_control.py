"""Both ends of the control channel, over a real socket."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node import INDEX_ONLY, Node

from radixshmem import Geometry, GeometryMismatch, NoSpace, RadixError, ServerInfo, ServerUnavailable
from radixshmem.control import ControlClient, codec
from radixshmem.control import control_pb2 as pb
from radixshmem.control.status_codes import code_of, error_of
from radixshmem.info import SERVER_MODES
from radixshmem.names import default_endpoint

METHODS = ("Status", "Configure", "WatchReady")


@pytest.fixture
def name(node: Node) -> str:
    """A server that waits for its geometry."""
    return node.serve()


@pytest.fixture
def client(name: str) -> Iterator[ControlClient]:
    client = ControlClient(default_endpoint(name))
    yield client
    client.close()


# -- the handshake ------------------------------------------------------------------------------


def test_status_configure_ready(client: ControlClient) -> None:
    assert client.status().mode == "waiting"
    assert client.configure(None).mode == "waiting"
    accepted = client.configure(INDEX_ONLY)
    assert accepted.mode in ("configuring", "ready")
    assert accepted.geometry is not None
    ready = client.wait_ready(30)
    assert (ready.mode, ready.progress, len(ready.epoch)) == ("ready", 1.0, 32)
    assert client.configure(INDEX_ONLY) == ready
    with pytest.raises(GeometryMismatch, match=r"block_size=16.*block_size=8"):
        client.configure(Geometry(8, 4096, full_slots=2000))
    with pytest.raises(ValueError, match="block_size"):
        client._call("Configure", pb.ConfigureRequest(geometry=pb.Geometry(full_slot_bytes=1)))


def test_watchers_beyond_the_servers_threads_are_all_served(node: Node) -> None:
    name = node.serve(rpc_workers=2)
    seen: list[str] = []

    def watch() -> None:
        client = ControlClient(default_endpoint(name))
        seen.append(client.wait_ready(30).mode)
        client.close()

    threads = [threading.Thread(target=watch) for _ in range(8)]
    for thread in threads:
        thread.start()
    configurer = ControlClient(default_endpoint(name))
    configurer.configure(INDEX_ONLY)
    configurer.close()
    for thread in threads:
        thread.join()
    assert seen == ["ready"] * 8


def test_waiting_client_hears_that_the_server_closes(node: Node) -> None:
    name = node.serve()
    client = ControlClient(default_endpoint(name))
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            client.wait_ready(30)
        except RadixError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    node.servers[name].close()
    thread.join()
    client.close()
    assert len(errors) == 1


def test_wait_ready_gives_up_in_time(client: ControlClient) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="waiting for a client's geometry"):
        client.wait_ready(0.2)
    assert time.monotonic() - start < 5


# -- nothing, or the wrong thing, at the socket -------------------------------------------------


@pytest.mark.parametrize("timeout_s", [1e19, float("inf")])
def test_the_longest_timeouts_are_no_passed_deadline(name: str, timeout_s: float) -> None:
    client = ControlClient(default_endpoint(name), timeout_s)
    try:
        assert client.status().mode == "waiting"
    finally:
        client.close()


def test_no_socket_is_unavailable_at_once(shm_name: str) -> None:
    client = ControlClient(default_endpoint(shm_name))
    start = time.monotonic()
    with pytest.raises(ServerUnavailable, match=r"^UNAVAILABLE: "):
        client.status()
    assert time.monotonic() - start < 1
    client.close()


def test_stale_socket_is_unavailable(shm_name: str) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"/dev/shm{shm_name}.sock")
    client = ControlClient(default_endpoint(shm_name))
    with pytest.raises(ServerUnavailable, match=r"^UNAVAILABLE: "):
        client.status()
    client.close()


def test_file_that_is_no_socket_is_refused(shm_name: str) -> None:
    Path(f"/dev/shm{shm_name}.sock").write_text("")
    client = ControlClient(default_endpoint(shm_name))
    with pytest.raises(RadixError, match="not a socket"):
        client.status()
    client.close()


def test_server_that_never_answers_is_a_timeout(shm_name: str) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"/dev/shm{shm_name}.sock")
        mute.listen()
        client = ControlClient(default_endpoint(shm_name), timeout_s=0.3)
        with pytest.raises((TimeoutError, ServerUnavailable)):
            client.status()
        client.close()


def test_client_finds_a_restarted_server_at_its_first_call(node: Node) -> None:
    name = node.serve()
    client = ControlClient(default_endpoint(name))
    assert client.status().mode == "waiting"
    node.servers[name].close()
    for _ in range(3):
        with pytest.raises(ServerUnavailable):
            client.status()
    node.serve(name=name)
    assert client.status().mode == "waiting"
    client.close()


# -- garbage ------------------------------------------------------------------------------------


def call_raw(name: str, method: str, payload: bytes) -> grpc.StatusCode:
    """Send ``payload`` as the request of ``method``; returns the status."""
    with grpc.insecure_channel(default_endpoint(name)) as channel:
        call: Any = channel.unary_unary(f"/radixshmem.control.v1.Control/{method}")
        try:
            call(payload, timeout=10)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


def test_random_requests_never_crash_the_server(name: str, client: ControlClient) -> None:
    seed = 20240607
    print(f"seed {seed}")
    rng = random.Random(seed)
    valid = pb.ConfigureRequest(geometry=codec.geometry_to_wire(INDEX_ONLY)).SerializeToString()
    for _ in range(100):
        payload = bytearray(valid) if rng.random() < 0.5 else bytearray(rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(4)):
            if payload:
                payload[rng.randrange(len(payload))] = rng.randrange(256)
        # Only Configure could be valid by chance, and then it is answered; nothing may be UNKNOWN.
        code = call_raw(name, rng.choice(METHODS[:2]), bytes(payload))
        assert code != grpc.StatusCode.UNKNOWN, payload.hex()
    assert client.status().mode in SERVER_MODES


def test_unknown_methods_and_oversized_requests_are_refused(name: str, client: ControlClient) -> None:
    assert call_raw(name, "Shutdown", b"") == grpc.StatusCode.UNIMPLEMENTED
    assert call_raw(name, "Configure", bytes(1 << 20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.status().mode == "waiting"


def test_bytes_that_are_not_http_leave_the_server_working(name: str, client: ControlClient) -> None:
    for payload in (b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), random.Random(1).randbytes(10_000)):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/dev/shm{name}.sock")
            connection.sendall(payload)
    assert client.status().mode == "waiting"


# -- codec and status codes ---------------------------------------------------------------------

COUNTS = st.integers(0, 2**32 - 1)
POOLS = st.fixed_dictionaries({"num_slots": COUNTS, "slot_bytes": COUNTS})
SWA_POOLS = st.fixed_dictionaries({"num_slots": COUNTS, "slot_bytes": COUNTS, "window_blocks": COUNTS})
PUBLISHED = st.fixed_dictionaries(
    {
        "block_size": COUNTS,
        "slot_align": COUNTS,
        "register_chunk_tokens": COUNTS,
        "fingerprint": st.text(),
        "pools": st.fixed_dictionaries({"full": POOLS}, optional={"swa": SWA_POOLS, "mamba": POOLS}),
    }
)
INFOS = st.builds(
    ServerInfo,
    name=st.text(),
    index_name=st.text(),
    data_name=st.text(),
    endpoint=st.text(),
    mode=st.sampled_from(SERVER_MODES),
    last_error=st.text(),
    rank=COUNTS,
    world_size=COUNTS,
    data_plane=st.booleans(),
    geometry=st.none() | PUBLISHED,
    hugepage_path=st.text(),
    pid=COUNTS,
    epoch=st.text(),
    version=st.text(),
    progress=st.floats(0, 1),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(INFOS)
def test_infos_survive_the_wire(info: ServerInfo) -> None:
    message = pb.ServerInfo.FromString(codec.info_to_wire(info).SerializeToString())
    assert codec.info_from_wire(message) == info


def test_geometries_survive_the_wire() -> None:
    geometry = Geometry(1, 2, 3, 4, 5, 8, 7, "f", 9, 10, 11)
    message = pb.Geometry.FromString(codec.geometry_to_wire(geometry).SerializeToString())
    assert codec.geometry_from_wire(message) == geometry


@pytest.mark.parametrize("error", [GeometryMismatch("x"), ValueError("x"), NoSpace("x"), RadixError("x")])
def test_errors_come_back_as_themselves(error: Exception) -> None:
    back = error_of(code_of(error), str(error))
    assert type(back) is type(error)
    assert str(back) == "x"


def test_unexpected_errors_come_back_as_radix_errors() -> None:
    assert code_of(ZeroDivisionError()) == grpc.StatusCode.INTERNAL
    assert type(error_of(grpc.StatusCode.INTERNAL, "x")) is RadixError
