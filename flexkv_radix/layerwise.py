"""Eventfds that tell an engine which layers of a load are in place.

The engine's rank makes an eventfd per counter and layer and hands them to the transfer worker, which
adds 1 to a layer's eventfd when its bytes are there.  A load names the counter it signals; several
counters let the next load start while the forward of the last one still waits.

    rank -> worker   four int32: rank, ranks, layers, counters
    rank -> worker   per counter: its number as int32, the layers' eventfds beside it (SCM_RIGHTS)
    worker -> rank   1 byte, 1: accepted
    worker -> rank   later, a byte n: the load that signals counter n failed (if the rank still listens)

The layers of a rank are numbered as it registered them: those of kv_caches, then those of
swa_kv_caches.

No layer of a failed load is signalled any more: its bytes must not be used.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from typing import Any

from flexkv_radix.transfer.protocol import TransferDied
from flexkv_radix.transfer.wire import close_fds, connect, send_fds, wait_readable

NUM_COUNTERS = 3
HANDSHAKE = struct.Struct("=4i")
COUNTER = struct.Struct("=i")
ACCEPTED = b"\x01"
_REPLY_TIMEOUT_S = 30.0


class LayerLoadFailed(RuntimeError):  # noqa: N818 - says what happened, as TransferDied does
    """The load failed; layers that were not signalled hold no valid bytes."""


def build_layerwise_eventfd_socket_path(dp_client_id: int, pp_rank: int, model_config: Any) -> str:
    """Path on which the worker of a data-parallel client expects the ranks of a pipeline stage.

    FLEXKV_LAYERWISE_EVENTFD_SOCKET, plus _pp<rank> and _dp<id> where model_config has more than one.
    """
    from flexkv_radix.settings import load_settings  # of no use to the worker, which imports this module

    path = load_settings().layerwise_eventfd_socket
    if getattr(model_config, "pp_size", 1) > 1:
        path += f"_pp{pp_rank}"
    if getattr(model_config, "dp_size", 1) > 1:
        path += f"_dp{dp_client_id}"
    return path


class LayerEvents:
    """The rank's side: the eventfds of num_counters × num_layers, waited for by the forward."""

    def __init__(self, num_layers: int, num_counters: int = NUM_COUNTERS) -> None:
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._fds = [[os.eventfd(0, flags) for _ in range(num_layers)] for _ in range(num_counters)]
        self._arrived: list[set[int]] = [set() for _ in range(num_counters)]
        self._failed: set[int] = set()
        self._sock: socket.socket | None = None
        self._worker: tuple[str, int, int] | None = None  # arguments of connect()

    def connect(self, path: str, rank: int, num_ranks: int, timeout_s: float = 360.0) -> None:
        """Hand the eventfds to the worker that listens, or will listen, on path."""
        self._worker = path, rank, num_ranks
        sock = connect(path, timeout_s)
        try:
            sock.settimeout(_REPLY_TIMEOUT_S)
            sock.sendall(HANDSHAKE.pack(rank, num_ranks, len(self._fds[0]), len(self._fds)))
            for counter_id, fds in enumerate(self._fds):
                send_fds(sock, fds, COUNTER.pack(counter_id))
            if sock.recv(1) != ACCEPTED:
                raise RuntimeError(f"{path}: the transfer worker refused the eventfds of rank {rank}")
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def reset(self, counter_id: int) -> None:
        """Forget what an earlier load signalled; call before the load that signals counter_id is launched.

        If the worker was replaced, the new one is given the eventfds; while there is none, loads fail.
        """
        self._follow_worker()
        self._read_failures()
        self._arrived[counter_id].clear()
        self._failed.discard(counter_id)
        for fd in self._fds[counter_id]:
            while _take_signal(fd):
                pass

    def wait(self, counter_id: int, layer: int, timeout_s: float = 60.0) -> None:
        """Return once the layer's bytes are in place; again at once until reset().

        LayerLoadFailed, TransferDied (the worker is gone), or TimeoutError: they are not.
        """
        fd = self._fds[counter_id][layer]
        deadline_s = time.monotonic() + timeout_s
        while layer not in self._arrived[counter_id]:
            if _take_signal(fd):
                self._arrived[counter_id].add(layer)
            elif counter_id in self._failed:
                raise LayerLoadFailed(f"layer {layer} of counter {counter_id} will not arrive")
            elif not self._wait_readable(fd, deadline_s - time.monotonic()):
                raise TimeoutError(f"layer {layer} of counter {counter_id} did not arrive in {timeout_s} s")

    def _follow_worker(self) -> None:
        if self._worker is None or (self._sock is not None and not _is_gone(self._sock)):
            return
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        with contextlib.suppress(OSError, RuntimeError):
            self.connect(*self._worker, timeout_s=0.0)

    def _wait_readable(self, fd: int, timeout_s: float) -> bool:
        if self._worker is None:
            raise RuntimeError("connect() comes before wait()")
        if self._sock is None:
            raise TransferDied("the transfer worker is gone")
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.register(self._sock, select.POLLIN)
        ready = [ready_fd for ready_fd, _ in poller.poll(max(0.0, timeout_s) * 1000)]
        if self._sock.fileno() in ready and fd not in ready and not self._read_failures():
            raise TransferDied("the transfer worker is gone")
        return bool(ready)

    def _read_failures(self) -> bool:
        """Take in which loads the worker says have failed; False: it is gone."""
        if self._sock is None:
            return False
        try:
            while wait_readable(self._sock):
                if not (data := self._sock.recv(64)):
                    return False
                self._failed.update(data)
        except OSError:
            return False
        return True

    def close(self) -> None:
        for fds in self._fds:
            close_fds(fds)
            fds.clear()
        if self._sock is not None:
            self._sock.close()


def _is_gone(sock: socket.socket) -> bool:
    """Whether the worker has closed its end; failures that it told are left to be read."""
    try:
        return wait_readable(sock) and not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _take_signal(fd: int) -> bool:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return False
    return True
