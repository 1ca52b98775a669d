"""Calls to a KVServer: from many threads, in a hurry, while it ends, unreadable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from kv_server import EXTERNAL
from node import Node

from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from radixshmem import RadixError

PROMPT = tokens_of(5 * BLOCK)
DATA_BYTES = 64 * SMALL_SLOT_BYTES


def num_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_threads_that_end_leave_nothing_open(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, range(5))
        before = num_files(), num_files(server.pid)
        found = []
        for _ in range(50):
            thread = threading.Thread(target=lambda: found.append(engine.manager.get_match(PROMPT)[1].sum()))
            thread.start()
            thread.join()
        assert found == [5 * BLOCK] * 50
        assert num_files() < before[0] + 25
        assert num_files(server.pid) < before[1] + 25


def test_calls_during_a_shutdown(node: Node, tmp_path: Path, server) -> None:
    """They find nothing, or say so with an error of the package; the shutdown waits for none."""
    name = node.serve(data_bytes=DATA_BYTES)
    errors: list[BaseException] = []

    def call(is_over: threading.Event, started: threading.Event) -> None:
        while not is_over.is_set():
            try:
                engine.manager.get_match(PROMPT)
                engine.manager.wait([1 << 20], 0.01)
            except RadixError:
                pass
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails of it
                errors.append(error)
            started.set()

    for _ in range(5):
        with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
            is_over, started = threading.Event(), [threading.Event() for _ in range(6)]
            threads = [threading.Thread(target=call, args=(is_over, each)) for each in started]
            for thread, each in zip(threads, started, strict=True):
                thread.start()
                assert each.wait(20)
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 5
            assert not engine.manager.get_match(PROMPT)[1].any()
            is_over.set()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        assert errors == []


def test_an_unreadable_request_is_answered(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, range(5))
        backend = engine.manager._backend
        server_of_client = backend._connection.server
        for verb in (m.Prefetch(b"", 3, 0), m.Poll(["x"]), m.Wait([1], "soon")):
            start_s = time.monotonic()
            with pytest.raises(ValueError, match="cannot read the request"):
                backend._call(server_of_client, verb, m.Done)
            assert time.monotonic() - start_s < 10
        assert engine.get(PROMPT, range(5)) == 5 * BLOCK


def test_nesting_without_end_harms_nobody(node: Node, tmp_path: Path, server) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"ipc://{tmp_path}/flexkv")
        dealer.send(b"\x94\xc4\x01t\x07\x91\xa5State" + b"\x91" * 100_000 + b"\xc0")
        dealer.send(m.encode(m.Request(b"a guessed token", 8, m.Poll([1]))))
        assert dealer.poll(20_000)
        assert m.decode_reply(dealer.recv()).call == 8
    assert server.poll() is None


def test_slow_introductions_hold_up_nobody(node: Node, tmp_path: Path, server) -> None:
    """Byte after byte: each would be in time for a server that waits for the next one only."""
    name = node.serve(data_bytes=DATA_BYTES)
    is_over = threading.Event()

    def drip(sock: socket.socket) -> None:
        while not is_over.wait(0.1):
            sock.sendall(b"\0")

    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(liveness.liveness_path(f"ipc://{tmp_path}/flexkv"))
            sock.sendall(struct.pack("<I", 1 << 16) + b"\0")
            thread = threading.Thread(target=drip, args=(sock,))
            thread.start()
            try:
                start_s = time.monotonic()
                assert engine.put(PROMPT, range(5)) == 5 * BLOCK
                assert engine.get(PROMPT, range(5, 10)) == 5 * BLOCK
                with small_engine(name, tmp_path, environ=EXTERNAL, dp_client_id=1) as other:
                    eventually(other.manager.is_ready, "another client", timeout_s=20)
                assert time.monotonic() - start_s < 20
            finally:
                is_over.set()
                thread.join()


def test_too_many_open_files_end_no_server(node: Node, tmp_path: Path, server) -> None:
    """Whatever it is that the limit hits: accepting a client, taking its lifeline, making its engine."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        spec = dataclasses.replace(engine.manager._backend._connection._spec, dp_client_id=5)
        engine.put(PROMPT, range(5))
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        free = min(set(range(1000)) - {int(fd) for fd in os.listdir(f"/proc/{server.pid}/fd")})
        for num_more in range(6):
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (free + num_more, limits[1]))
            with contextlib.suppress(OSError):
                sock, lifeline, _ = liveness.connect(
                    f"ipc://{tmp_path}/flexkv", m.Hello(spec, os.getpid()), 3
                )
                sock.close()
                lifeline.close()
            assert server.poll() is None
            assert engine.get(PROMPT, range(5)) == 5 * BLOCK
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        with small_engine(name, tmp_path, environ=EXTERNAL, dp_client_id=5).wait_ready() as other:
            assert other.get(PROMPT, range(5)) == 5 * BLOCK
    assert server.poll() is None
