"""Whose rank it is that wants to register: nothing that a rank says tells it, but its process does.

An endpoint that follows from FLEXKV_SERVER_RECV_PORT is easily given to two engines, whose ranks then look
alike.  So every engine claims its endpoint, and a rank is the engine's to whose process it is nearest in the
tree of processes; in doubt it is nobody's.

A claim is a locked byte in a file beside the endpoint.  POSIX locks end with their process, and a child that
it forked has none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from flexkv_radix.transfer.peers import StrangerError
from flexkv_radix.transfer.protocol import Contest, Owner
from flexkv_radix.transfer.wire import Channel, connect, socket_path

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
_SPAN = 1 << 20  # bytes of the file for the claims of one endpoint
_FIX = "give each engine a FLEXKV_SERVER_RECV_PORT, or an id, of its own"

Lineage: TypeAlias = list[int]  # a process, its parent, and so on
Nearness: TypeAlias = tuple[int, bool]  # the less the nearer

# Closing a file ends all locks that the process has on it, so it stays open: by path.
_files: dict[str, int] = {}
_files_lock = threading.Lock()


def new_owner(*, is_private: bool) -> Owner:
    """This process as the owner of an endpoint; is_private as of Owner."""
    return Owner(os.getpid(), 2 * secrets.randbelow(_SPAN // 2), is_private)  # neighbours would merge


class Claim:
    """Held by a KVManager from the beginning to the end, whether it gets to use the endpoint or not."""

    def __init__(self, endpoint: str, owner: Owner) -> None:
        """An engine that uses the endpoint learns of it at once, if there is one."""
        self._owner = owner
        self._file = -1
        with contextlib.suppress(OSError):  # the transfer worker meets it too, and says so
            self._file, self._start = _open_kept(endpoint), _start_of(endpoint) + owner.claim
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._start)
        with contextlib.suppress(OSError, StrangerError):  # nobody listens, or nobody of ours
            channel = Channel(connect(endpoint, 0.0))
            with contextlib.closing(channel.sock):
                channel.send(Contest())

    def close(self) -> None:
        """Give the endpoint up.  A second call does nothing."""
        file, self._file = self._file, -1
        if file >= 0 and os.getpid() == self._owner.pid:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, self._start)

    def __del__(self) -> None:
        self.close()


class Gate:
    """The transfer worker's side: who may come in."""

    def __init__(self, endpoint: str, owner: Owner | None) -> None:
        """owner None: everybody."""
        self._endpoint = endpoint
        self._owner = owner

    def rival(self) -> str:
        """Who else claims the endpoint, and what to do about it; "" if nobody does.  OSError if unknown."""
        pids = self._rivals()
        return f"{self._endpoint}: {_engine_of(pids[0])} uses this endpoint too; {_FIX}" if pids else ""

    def refusal(self, pid: int, *, is_in: bool = False) -> str:
        """Why a rank in process pid is not taken, or, if it is in, has to go; "" if it may stay.

        pid 0: a process that cannot be seen from here.  A rank that came when there was no doubt stays
        until another engine is nearer.
        """
        if self._owner is None:
            return ""
        rank, ours = lineage(pid), self._nearness(pid)
        for rival in self._rivals():
            theirs = _nearness(rank, lineage(rival))
            if theirs < ours or (theirs == ours and not is_in):
                return f"process {pid} may be of {_engine_of(rival)}, which uses this endpoint too; {_FIX}"
        _, is_stranger = ours
        if is_stranger and not self._owner.is_private:
            return (
                f"process {pid} was not started by the engine in process {self._owner.pid}, and an endpoint "
                "that follows from FLEXKV_SERVER_RECV_PORT may be others' too: give KVManager a "
                "gpu_register_port of its own"
            )
        return ""

    def is_nearer(self, pid: int, other_pid: int) -> bool:
        """Whether pid is more likely of this engine than other_pid."""
        return self._nearness(pid) < self._nearness(other_pid)

    def _nearness(self, pid: int) -> Nearness:
        return (0, False) if self._owner is None else _nearness(lineage(pid), lineage(self._owner.pid))

    def _rivals(self) -> list[int]:
        """Processes of the other engines that claim the endpoint; 0 for one that cannot be seen from here."""
        if self._owner is None:
            return []
        file = _open(self._endpoint)
        try:
            start = _start_of(self._endpoint)
            return [max(0, pid) for at, pid in _locks(file, start) if at != start + self._owner.claim]
        finally:
            os.close(file)


def lineage(pid: int) -> Lineage:
    """pid, its parent, and so on up to the first process; [] for 0."""
    pids: list[int] = []
    while pid > 0:
        pids.append(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return pids


def _nearness(rank: Lineage, engine: Lineage) -> Nearness:
    """(steps up from the rank to the engine's process or an ancestor of it, whether it is an ancestor)."""
    for steps, pid in enumerate(rank):
        if pid in engine:
            return steps, pid != engine[0]
    return sys.maxsize, True


def _engine_of(pid: int) -> str:
    return f"the engine in process {pid}" if pid else "an engine in another container"


def _start_of(endpoint: str) -> int:
    """Where the claims of endpoint begin in the file of its directory."""
    name = os.path.basename(socket_path(endpoint))
    return int.from_bytes(sha256(name.encode()).digest()[:5], "little") * _SPAN


def _path_of(endpoint: str) -> str:
    return os.path.join(os.path.dirname(socket_path(endpoint)), f".flexkv-claims-{os.getuid()}")


def _open(endpoint: str) -> int:
    return os.open(_path_of(endpoint), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _open_kept(endpoint: str) -> int:
    """The process's descriptor for claims at endpoint; another one if the file was removed meanwhile."""
    path = _path_of(endpoint)
    with _files_lock:
        if path not in _files or not _is_at(path, _files[path]):
            _files[path] = _open(endpoint)
        return _files[path]


def _is_at(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _locks(file: int, start: int) -> Iterator[tuple[int, int]]:
    """(offset, process) of each byte that other processes have locked; the kernel tells one of a range."""
    ranges = [(start, _SPAN)]
    while ranges:
        begin, num_bytes = ranges.pop()
        if num_bytes <= 0:
            continue
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, num_bytes, 0)
        kind, _, at, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            yield at, pid
            ranges += [(begin, at - begin), (at + 1, begin + num_bytes - at - 1)]
