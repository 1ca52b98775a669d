"""Those who connected to a listener and have not introduced themselves so far.

What they say is read as it comes: one who is silent or slow holds up nobody, and is sent away after a
while.
"""

from __future__ import annotations

import array
import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from flexkv_radix.transfer.peers import StrangerError, check_peer
from flexkv_radix.transfer.wire import close_fds

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0  # from connecting to the last word of an introduction, which is written in one go
_PAUSE_S = 1.0  # of a listener, when there are too many open files
_READ_BYTES = 256 << 10
_MAX_FDS = 253  # in one message: the kernel's limit
_LENGTH = struct.Struct("<I")


class Arrival:
    """A connection, and what came over it so far.  Its socket does not block."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline_s = time.monotonic() + _PATIENCE_S
        self.data = bytearray()
        self.fds: list[int] = []

    def payload(self, max_bytes: int) -> bytes | None:
        """Of the message at the start (wire.py); None until it is there.  ValueError if it is too long."""
        if len(self.data) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self.data)
        if num_bytes > max_bytes:
            raise ValueError(f"a message of {num_bytes} bytes is more than {max_bytes}")
        end = _LENGTH.size + num_bytes
        return None if len(self.data) < end else bytes(self.data[_LENGTH.size : end])

    def take_fds(self, num_fds: int) -> list[int] | None:
        """The descriptors, the caller's from now on; None until there are num_fds.  ValueError if more."""
        if len(self.fds) > num_fds:
            raise ValueError(f"{len(self.fds)} descriptors came, {num_fds} are expected")
        if len(self.fds) < num_fds:
            return None
        fds, self.fds = self.fds, []
        return fds

    def read(self) -> None:
        """Take in what is there.  ConnectionError if that is the end, or descriptors were lost."""
        packed = array.array("i")
        space = socket.CMSG_SPACE(_MAX_FDS * packed.itemsize)
        data, ancillary, flags, _ = self.sock.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                packed.frombytes(payload[: len(payload) - len(payload) % packed.itemsize])
        self.fds += packed
        self.data += data
        if not data:
            raise ConnectionError(f"the connection ended after {len(self.data)} bytes")
        if flags & socket.MSG_CTRUNC:
            raise ConnectionError("descriptors were lost: too many open files")

    def close(self) -> None:
        self.sock.close()
        close_fds(self.fds)


# Looks at what came so far.  What is to be done with the one who introduced himself, whose socket and
# descriptors are taken over by it; or None: more has to come.  OSError, ValueError, MsgspecError: never.
Meet: TypeAlias = Callable[[Arrival], Callable[[], None] | None]


@dataclass(eq=False)
class _Door:
    listener: socket.socket
    meet: Meet
    closed_until_s: float = 0.0


class Reception:
    """To be served by a loop: when fileno() is readable, and after timeout_s()."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._arrivals: set[Arrival] = set()
        self._closed: list[_Door] = []

    def fileno(self) -> int:
        return self._selector.fileno()

    def open(self, listener: socket.socket, meet: Meet) -> None:
        """Receive who connects to listener, which stays the caller's."""
        listener.setblocking(False)
        self._open(_Door(listener, meet))

    def _open(self, door: _Door) -> None:
        self._selector.register(door.listener, selectors.EVENT_READ, lambda: self._accept(door))

    def timeout_s(self) -> float | None:
        """How long serve() may wait if nobody says anything; None: for ever."""
        times = [arrival.deadline_s for arrival in self._arrivals]
        times += [door.closed_until_s for door in self._closed]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def serve(self) -> None:
        """Do what can be done now, without waiting.  Raises what is raised by what a Meet returned."""
        for key, _ in self._selector.select(0):
            key.data()
        now_s = time.monotonic()
        for arrival in [arrival for arrival in self._arrivals if arrival.deadline_s < now_s]:
            logger.warning("a connection was closed: %d bytes in %g s", len(arrival.data), _PATIENCE_S)
            self._forget(arrival)
            arrival.close()
        for door in [door for door in self._closed if door.closed_until_s < now_s]:
            self._closed.remove(door)
            self._open(door)

    def _accept(self, door: _Door) -> None:
        try:
            sock, _ = door.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # it would be readable again at once
            logger.warning("%s: nobody can connect now: %s", door.listener.getsockname(), error)
            self._selector.unregister(door.listener)
            door.closed_until_s = time.monotonic() + _PAUSE_S
            self._closed.append(door)
            return
        try:
            check_peer(sock, door.listener.getsockname())
        except StrangerError as error:
            logger.warning("somebody was turned away: %s", error)
            sock.close()
            return
        arrival = Arrival(sock)
        self._arrivals.add(arrival)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(door, arrival))

    def _hear(self, door: _Door, arrival: Arrival) -> None:
        try:
            arrival.read()
            welcome = door.meet(arrival)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            logger.warning("%s: an introduction broke off: %s", door.listener.getsockname(), error)
            self._forget(arrival)
            arrival.close()
            return
        if welcome is not None:
            self._forget(arrival)
            welcome()

    def _forget(self, arrival: Arrival) -> None:
        self._arrivals.remove(arrival)
        self._selector.unregister(arrival.sock)

    def close(self) -> None:
        """Send away who is here.  A second call does nothing."""
        while self._arrivals:
            self._arrivals.pop().close()
        self._selector.close()
