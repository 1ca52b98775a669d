"""Those who connect and do not introduce themselves: read as they speak, and sent away."""

from __future__ import annotations

import functools
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_engine import wait_for

from flexkv_radix.transfer import reception as module
from flexkv_radix.transfer.reception import Arrival, Reception
from flexkv_radix.transfer.wire import connect, listen, send_fds, wait_readable

NUM_FDS = 300  # more than one message takes


class Hall:
    """A reception where one has to say a message, and bring NUM_FDS descriptors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = listen(str(path))
        self.reception = Reception()
        self.reception.open(self.listener, self._meet)
        self.guests: list[tuple[bytes, list[int]]] = []

    def _meet(self, arrival: Arrival):
        payload = arrival.payload(100)
        fds = None if payload is None else arrival.take_fds(NUM_FDS)
        return None if fds is None else functools.partial(self._welcome, arrival.sock, payload, fds)

    def _welcome(self, sock: socket.socket, payload: bytes, fds: list[int]) -> None:
        self.guests.append((payload, fds))
        sock.close()

    def connect(self) -> socket.socket:
        return connect(str(self.path), 1.0)

    def serve_until_closed(self, sock: socket.socket) -> None:
        def is_closed() -> bool:
            self.reception.serve()
            return wait_readable(sock) and sock.recv(1) == b""

        wait_for(is_closed, "the end of the connection")


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    hall = Hall(tmp_path / "hall")
    yield hall
    hall.reception.close()
    hall.listener.close()


def test_an_introduction_in_pieces(hall: Hall) -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    with hall.connect() as sock:
        for byte in b"\x05\0\0\0hello":
            sock.sendall(bytes([byte]))
            hall.reception.serve()
            hall.reception.serve()
            assert not hall.guests
        send_fds(sock, [fd] * NUM_FDS)
        hall.serve_until_closed(sock)
    [(payload, fds)] = hall.guests
    assert payload == b"hello"
    assert {os.fstat(other).st_rdev for other in fds} == {os.fstat(fd).st_rdev}
    assert len(fds) == NUM_FDS
    for other in (fd, *fds):
        os.close(other)
    assert hall.reception.timeout_s() is None


@pytest.mark.parametrize(
    "said", [b"", b"\x05", b"\x05\0\0\0hello"], ids=["nothing", "a byte", "no descriptors"]
)
def test_the_silent_are_sent_away(said: bytes, hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    before = os.listdir("/proc/self/fd")
    with hall.connect() as sock:
        sock.sendall(said)
        hall.reception.serve()
        assert 0 < hall.reception.timeout_s() <= 0.1
        hall.serve_until_closed(sock)
    assert not hall.guests
    assert os.listdir("/proc/self/fd") == before


def test_too_many_descriptors_are_refused_and_closed(hall: Hall) -> None:
    before = os.listdir("/proc/self/fd")
    with hall.connect() as sock, open(os.devnull) as file:
        sock.sendall(b"\0\0\0\0")
        send_fds(sock, [file.fileno()] * (NUM_FDS + 1))
        hall.serve_until_closed(sock)
    assert not hall.guests
    assert os.listdir("/proc/self/fd") == before


def test_too_many_open_files_neither_end_it_nor_keep_it_busy(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with hall.connect() as sock:
        free = os.dup(sock.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            hall.reception.serve()
            is_busy = wait_readable(hall.reception)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "nobody can connect now" in caplog.text
        assert not is_busy
        assert 0 < hall.reception.timeout_s() <= 0.1
        sock.sendall(b"\xff\xff\xff\xff")  # too long
        hall.serve_until_closed(sock)
