"""The control socket under anything that a process may send: a status, and a server that goes on serving."""

from __future__ import annotations

import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from daemon import Daemon, eventually
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from radixshmem import Geometry, RadixClient, RadixServer, ServerConfig
from radixshmem.control import control_pb2 as pb
from radixshmem.names import default_endpoint, shm_path

SEED = int(os.environ.get("RADIX_FUZZ_SEED", "1"))
MESSAGES = int(os.environ.get("RADIX_FUZZ_MESSAGES", "300"))
SERVICE = "/radixshmem.control.v1.Control"
GEOMETRY = Geometry(16, 4096, fingerprint="fuzz")
DATA_BYTES = 1 << 20
DEADLINE_S = 30.0
Code = grpc.StatusCode
# What bad requests get.  INTERNAL is grpc's own answer to bytes that are no message.
REFUSED = {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED}

numbers = st.one_of(
    st.sampled_from([0, 1, 2, 16, 4096, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)
wild = st.builds(
    pb.Geometry,
    fingerprint=st.one_of(st.just(""), st.text(max_size=200)),
    **{field.name: numbers for field in pb.Geometry.DESCRIPTOR.fields if field.name != "fingerprint"},
)
sizes = st.sampled_from([1, 64, 100, 4096, 65536, DATA_BYTES, DATA_BYTES + 1, 2**40])
near = st.builds(
    pb.Geometry,
    block_size=st.sampled_from([0, 1, 16, 16, 2**31]),
    full_slot_bytes=sizes,
    swa_slot_bytes=st.sampled_from([0, 0, 64, 4096, 2**40]),
    swa_window_blocks=st.sampled_from([0, 0, 1, 8, 1024, 1025]),
    mamba_slot_bytes=st.sampled_from([0, 0, 1, 4096, DATA_BYTES]),
    slot_align=st.sampled_from([0, 0, 1, 3, 4096, 2**20]),
    fingerprint=st.sampled_from(["", "fuzz", "other", "x" * 128]),
    full_slots=st.sampled_from([0, 0, 0, 7]),
)
geometries = st.one_of(near, near, near, wild)
many = settings(max_examples=MESSAGES, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Caller:
    """Sends bytes to a method of the control service."""

    def __init__(self, name: str) -> None:
        self._channel = grpc.insecure_channel(default_endpoint(name), [("grpc.max_send_message_length", -1)])

    def call(self, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
        try:
            self._channel.unary_unary(f"{SERVICE}/{method}")(message, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return error.code(), error.details()  # type: ignore[attr-defined]
        return Code.OK, ""

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    name = f"/t-rpc-{os.getpid()}"
    with Daemon(name, "--data-bytes", str(DATA_BYTES), "--rpc-workers", "4") as daemon:
        daemon.wait_serving()
        with RadixClient(name, GEOMETRY) as client:
            client.wait_ready(DEADLINE_S)
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.fixture
def caller(daemon: Daemon) -> Iterator[Caller]:
    with closing(Caller(daemon.name)) as caller:
        yield caller
        check_serving(daemon)


def check_serving(daemon: Daemon) -> None:
    """The server still has its regions, and a new client is served."""
    info = daemon.status()
    assert info is not None
    assert info.mode == "ready"
    with RadixClient(daemon.name, GEOMETRY) as client:
        assert client.wait_ready(DEADLINE_S).epoch == info.epoch
        slots = client.allocate_slots(3)
        assert len(slots) == 3
        client.recycle_slots(slots)


def test_every_geometry_is_taken_or_refused_by_name(caller: Caller) -> None:
    codes: Counter[grpc.StatusCode] = Counter()

    @seed(SEED)
    @many
    @given(geometry=geometries)
    def offer(geometry: pb.Geometry) -> None:
        code, details = caller.call("Configure", pb.ConfigureRequest(geometry=geometry).SerializeToString())
        codes[code] += 1
        assert code in REFUSED | {Code.OK}, details
        assert code == Code.OK or details

    offer()
    print(f"seed {SEED}: {codes}")
    assert codes[Code.INVALID_ARGUMENT] > 0
    assert codes[Code.FAILED_PRECONDITION] > 0


def test_bytes_that_are_no_message(caller: Caller) -> None:
    rng = random.Random(SEED)
    valid = pb.ConfigureRequest(
        geometry=pb.Geometry(block_size=16, full_slot_bytes=4096, fingerprint="fuzz")
    ).SerializeToString()
    codes: Counter[grpc.StatusCode] = Counter()
    for _ in range(MESSAGES):
        message = mutate(rng, valid) if rng.random() < 0.7 else rng.randbytes(rng.randrange(200))
        method = rng.choice(["Configure", "Configure", "Status", "WatchReady"])
        code, _ = caller.call(method, message)
        codes[code] += 1
        assert code in REFUSED | {Code.OK, Code.INTERNAL}
    print(f"seed {SEED}: {codes}")
    assert codes[Code.INTERNAL] > 0
    assert codes[Code.OK] > 0


def mutate(rng: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        how = rng.randrange(3)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif len(data) > 1:
            del data[at]
    return bytes(data)


def test_methods_that_are_not_there(caller: Caller) -> None:
    for method in ("Reset", "", "configure", "Configure/more"):
        assert caller.call(method, b"")[0] == Code.UNIMPLEMENTED


def test_a_message_of_megabytes_is_not_read(caller: Caller) -> None:
    code, _ = caller.call("Configure", bytes(8 << 20))
    assert code == Code.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_http2(daemon: Daemon, caller: Caller) -> None:
    rng = random.Random(SEED)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    sockets = []
    for number in range(60):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(DEADLINE_S)
        connection.connect(shm_path(daemon.name) + ".sock")
        sockets.append(connection)
        start = (b"", preface, b"GET / HTTP/1.1\r\n\r\n")[number % 3]
        try:
            connection.sendall(start + rng.randbytes(rng.randrange(3000)))
        except OSError:
            assert start != b"", "the server hung up before it had read anything"
        if number % 2:
            connection.close()
    check_serving(daemon)  # while half of them still hang on
    for connection in sockets:
        connection.close()


def test_streams_that_nobody_reads() -> None:
    """A waiting server with few threads: watchers must not keep a geometry out."""
    name = f"/t-rpc-watch-{os.getpid()}"
    with Daemon(name, "--data-bytes", str(DATA_BYTES), "--rpc-workers", "2") as daemon:
        daemon.wait_mode("waiting")
        with grpc.insecure_channel(default_endpoint(name)) as channel:
            watch = channel.unary_stream(f"{SERVICE}/WatchReady")
            streams = [watch(b"", timeout=DEADLINE_S * 4) for _ in range(30)]
            with RadixClient(name, GEOMETRY) as client:
                client.wait_ready(DEADLINE_S)
            for stream in streams:
                stream.cancel()
        assert daemon.stop() == 0


def test_a_waiting_server_survives_every_first_geometry() -> None:
    """Whatever is accepted is served; whatever is refused leaves the server waiting, with nothing made."""
    outcomes: Counter[str] = Counter()

    @seed(SEED)
    @settings(many, max_examples=MESSAGES // 5)
    @given(geometry=geometries)
    def begin(geometry: pb.Geometry) -> None:
        name = f"/t-rpc-first-{os.getpid()}"
        config = ServerConfig(
            name=name, data_bytes=DATA_BYTES, swa_ratio=0.2, mamba_ratio=0.1, metrics_address=""
        )
        with RadixServer(config) as server, closing(Caller(name)) as caller:
            code, details = caller.call(
                "Configure", pb.ConfigureRequest(geometry=geometry).SerializeToString()
            )
            outcomes[code.name] += 1
            assert code in REFUSED | {Code.OK}, details
            if code == Code.OK:
                eventually(lambda: server.info.mode == "ready", f"ready: {server.info}")
            else:
                assert server.info.mode in ("waiting", "failed")
                assert not Path(shm_path(name)).exists()
        assert not Path(shm_path(name)).exists()

    begin()
    print(f"seed {SEED}: {outcomes}")
    assert outcomes["OK"] > 0
