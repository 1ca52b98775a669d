"""The engine's side of the transfer worker."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flexkv_radix.transfer.protocol import (
    DeviceMarked,
    Failed,
    Joined,
    MarkDevice,
    Message,
    OpResult,
    Ready,
    Results,
    Start,
    Stop,
    Submit,
    TransferConfig,
    TransferDied,
    TransferOp,
)
from flexkv_radix.transfer.wire import BacklogFull, Channel, send_fds

_STOP_TIMEOUT_S = 10.0  # a worker that does not stop by then is killed
_STOP_POLL_S = 0.01
_SAY_WAITING_S = 30.0

logger = logging.getLogger(__name__)


class TransferHandle:
    """Spawns the transfer worker of one engine and talks to it.

    The worker shares lease_fd's open file, so that the client's staged slots stay its own until the
    worker is gone.  It is handed over through the socket: a second descriptor in this process would
    outlive a fork of it, which the first one does not (csrc/fds.c).

    lifeline_fd: by it others know when the worker is gone (lifeline.py).  It stays the caller's.

    mark_device is called (by is_ready or poll) before the worker registers slots with a device: pass
    RadixClient.set_device.

    submit() may be called from any thread; is_ready(), poll() and shutdown() from one at a time.  Nothing
    waits for a worker that does not read: what its socket does not take, is_ready() and poll() send on.
    """

    def __init__(
        self,
        config: TransferConfig,
        *,
        lease_fd: int,
        lifeline_fd: int | None = None,
        mark_device: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._lease_fd = lease_fd
        self._lifeline_fds = () if lifeline_fd is None else (lifeline_fd,)
        self._mark_device = mark_device
        self._channel: Channel | None = None
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._results: list[OpResult] = []
        self._is_ready = False
        self._num_joined = 0
        self._say_waiting_s = 0.0  # when to say next what is waited for
        self._failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Spawn the worker and return at once."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        send_fds(ours, [self._lease_fd])
        self._channel = Channel(ours)
        self._say_waiting_s = time.monotonic() + _SAY_WAITING_S
        self._thread = threading.Thread(target=self._keep, args=(theirs,), name="transfer", daemon=True)
        self._thread.start()
        self._send(Start(self._config))

    def _keep(self, theirs: socket.socket) -> None:
        """Spawn the worker and wait for its end.

        The kernel ends a child when the *thread* that made it dies (PR_SET_PDEATHSIG), so this one
        stays as long as the worker does.
        """
        command = [
            sys.executable,
            "-m",
            "flexkv_radix.transfer.worker",
            str(theirs.fileno()),
            str(os.getpid()),
            *map(str, self._lifeline_fds),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), *self._lifeline_fds),
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError as error:
            self._failure = f"cannot start {command[0]}: {error}"
        finally:
            theirs.close()
        if self._process is not None:
            self._process.wait()
        with contextlib.suppress(OSError):  # a process forked meanwhile may have a copy of `theirs`
            self._started().sock.shutdown(socket.SHUT_RDWR)

    @property
    def pid(self) -> int | None:
        """The worker's process id, once it was spawned."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """A descriptor that is readable when poll() or is_ready() has something to read."""
        return self._started().fileno()

    def is_ready(self) -> bool:
        """True once every rank has registered.  TransferDied with the worker's text if start-up failed."""
        channel = self._started()
        if not self._is_ready:
            self._read()
        if not self._is_ready and not channel.is_open:
            raise TransferDied(f"transfer worker: start-up failed: {self._cause()}")
        if not self._is_ready and time.monotonic() > self._say_waiting_s:
            self._say_waiting()
        return self._is_ready

    def _say_waiting(self) -> None:
        self._say_waiting_s = time.monotonic() + _SAY_WAITING_S
        num_ranks = self._config.num_ranks
        logger.warning(
            "%d of %d ranks registered at %s%s",
            self._num_joined,
            num_ranks,
            self._config.register_endpoint,
            ": their KV tensors are being prepared" if self._num_joined == num_ranks else "",
        )

    def submit(self, ops: list[TransferOp]) -> None:
        """Queue ops.  TransferDied when the worker is gone; RuntimeError before is_ready().

        BacklogFull, a RuntimeError too, when the worker has not read for very long.
        """
        if not self._is_ready:
            raise RuntimeError("submit: the transfer worker is not ready; wait until is_ready()")
        self._send(Submit(ops))

    def poll(self, timeout_s: float = 0.0) -> list[OpResult]:
        """Results that arrived since the last call; waits up to timeout_s for the first one.

        TransferDied once the worker is gone and every result it sent was returned.
        """
        channel = self._started()
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._read()
            if self._results:
                results, self._results = self._results, []
                return results
            if not channel.is_open:
                raise TransferDied(f"transfer worker: {self._cause()}")
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0:
                return []
            channel.wait(wait_s)

    def shutdown(self) -> None:
        """Stop the worker and wait for it; idempotent."""
        if self._channel is None or self._thread is None:
            return
        with contextlib.suppress(TransferDied, BacklogFull):
            self._send(Stop())
            self._wait_stopped()
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()
        self._channel.close()

    def _wait_stopped(self) -> None:
        """Until the worker has ended, within limits.  It may have results to get rid of before."""
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline_s:
            self._read()
            self._thread.join(_STOP_POLL_S)

    def _started(self) -> Channel:
        if self._channel is None:
            raise RuntimeError("start() comes first")
        return self._channel

    def _send(self, message: Message) -> None:
        channel = self._started()
        try:
            with self._send_lock:
                channel.post(message)
        except OSError as error:
            raise TransferDied(f"transfer worker: {self._cause()}") from error

    def _read(self) -> None:
        channel = self._started()
        if not channel.is_open:
            return
        if channel.has_backlog:
            with self._send_lock, contextlib.suppress(OSError):  # reading meets the end as well
                channel.flush()
        with self._receive_lock:
            for message in channel.receive_available():
                self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Results(results=results):
                self._results += results
            case Ready():
                self._is_ready = True
            case Joined(num_ranks=num_ranks):
                self._num_joined = num_ranks
            case Failed(error=error):
                self._failure = error
            case MarkDevice():
                if self._mark_device is not None:
                    self._mark_device()
                self._send(DeviceMarked())
            case _:
                raise RuntimeError(f"transfer worker: unexpected {type(message).__name__}")

    def _cause(self) -> str:
        """Why the worker is gone, in words."""
        if self._failure:
            return self._failure
        if self._thread is not None:
            self._thread.join(1.0)
        status = None if self._process is None else self._process.returncode
        return f"the process ended with status {status}; its own output says why"


def _environment() -> dict[str, str]:
    """This process's environment, with this package importable and every GPU visible.

    Ranks name their GPU by UUID; one that this process does not use may be hidden from it.  A MIG
    slice has to stay named.
    """
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["PYTHONSAFEPATH"] = "1"  # not what lies where the engine was started (Python >= 3.11)
    if not environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment
