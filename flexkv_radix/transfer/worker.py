"""The transfer worker of one engine: python -m flexkv_radix.transfer.worker <socket fd> <parent pid>.

It runs apart from the engine so that copies and driver calls never hold up the engine's interpreter,
and so that a crash of one is not a crash of the other.  It never outlives its parent: the engine's
staged slots go to others once the lease, of which it holds a dup, is released.

    waiting for ranks --all registered--> ready --a rank left--> waiting for ranks
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from flexkv_radix.transfer.lane import Equipment, Lane
from flexkv_radix.transfer.mapping import MappedStore
from flexkv_radix.transfer.mover import Mover, Placement, RankMemory, place
from flexkv_radix.transfer.protocol import (
    DeviceMarked,
    Failed,
    MarkDevice,
    Message,
    OpKind,
    OpResult,
    RankPlace,
    Ready,
    Register,
    Registered,
    RegisterRank,
    Results,
    Start,
    Stop,
    Submit,
    TransferConfig,
)
from flexkv_radix.transfer.signals import LayerSignals
from flexkv_radix.transfer.wire import Channel, close_fds, listen, receive_fds, socket_path

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000  # short sleeps between looks at a running transfer should be short
_REGISTRATION_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Worker:
    """Answers the engine and its ranks, and equips the lanes while all ranks are there."""

    def __init__(self, engine: Channel, config: TransferConfig) -> None:
        self._engine = engine
        self._send_lock = threading.Lock()
        self._config = config
        self._store = MappedStore(config.store)
        self._ranks: dict[Channel, RankMemory] = {}
        self._mover: Mover | None = None
        self._equipment: Equipment | str = "no rank has registered its KV tensors"
        self._signals = LayerSignals(config.layerwise_sockets)
        self._listener = listen(config.register_endpoint)
        self._lanes = {kind: Lane(kind, self._report) for kind in OpKind}
        self._selector = selectors.DefaultSelector()
        self._watch(engine.sock, self._serve_engine)
        self._watch(self._listener, self._accept_rank)
        for sock, pp_rank in self._signals.listeners:
            self._watch(sock, functools.partial(self._accept_eventfds, sock, pp_rank))
        self._is_stopping = False

    def run(self) -> None:
        """Serve until the engine says stop."""
        while not self._is_stopping:
            for key, _ in self._selector.select():
                key.data()
        for lane in self._lanes.values():
            lane.stop()
        self._remove_sockets()

    def _watch(self, sock: socket.socket, serve: Callable[[], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, serve)

    def _remove_sockets(self) -> None:
        paths = [socket_path(self._config.register_endpoint)]
        paths += [socket_path(at.path) for at in self._config.layerwise_sockets]
        for path in paths:
            os.unlink(path)

    # -- the engine

    def _serve_engine(self) -> None:
        messages = self._engine.receive_available()
        for message in messages:
            if isinstance(message, Submit):
                for op in message.ops:
                    self._lanes[op.kind].submit(op, self._equipment)
            elif isinstance(message, Stop):
                self._is_stopping = True
        if not self._engine.is_open:
            os._exit(0)  # the engine is gone: not a byte more into its slots

    def _report(self, result: OpResult) -> None:
        self._send(Results([result]))

    def _send(self, message: Message) -> None:
        with self._send_lock:
            self._engine.send(message)

    def _mark_device(self) -> None:
        """Have the engine flag its client entry before slots are registered with a device."""
        self._send(MarkDevice())
        reply = self._engine.receive()
        if not isinstance(reply, DeviceMarked):
            raise RuntimeError(f"the engine answered MarkDevice with {reply}")

    # -- ranks

    def _accept_rank(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(_REGISTRATION_TIMEOUT_S)
        channel = Channel(sock)
        try:
            rank, fds = _receive_rank(channel)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("a rank's registration broke off: %s", error)
            channel.close()
            return
        try:
            placement = self._add_rank(channel, rank, fds)
        except Exception as error:
            _reply(channel, str(error))
            raise
        finally:
            close_fds(fds)
        _reply(channel, "")
        if placement is not None:
            self._equip(placement)

    def _add_rank(self, channel: Channel, rank: RegisterRank, fds: list[int]) -> Placement | None:
        """Map a rank's memory; the placement of all ranks if it was the last one."""
        self._ranks[channel] = _map_rank(rank, fds)
        self._watch(channel.sock, functools.partial(self._serve_rank, channel))
        logger.info("%s registered, %d of %d", rank.place, len(self._ranks), self._config.num_ranks)
        if len(self._ranks) < self._config.num_ranks:
            return None
        return place(self._store, list(self._ranks.values()))

    def _serve_rank(self, channel: Channel) -> None:
        channel.receive_available()
        if channel.is_open:
            return
        self._selector.unregister(channel.sock)
        memory = self._ranks.pop(channel)
        self._unequip(f"{memory.rank.place} is gone")
        memory.close()
        channel.close()

    def _equip(self, placement: Placement) -> None:
        self._mover = self._new_mover(placement)
        self._signals.bind(_num_layers(placement))
        self._equipment = Equipment(placement, self._mover, self._signals)
        self._send(Ready())

    def _unequip(self, why: str) -> None:
        self._equipment = why
        self._drain()
        if self._mover is not None:
            self._mover.close()
        self._mover = None

    def _drain(self) -> None:
        for lane in self._lanes.values():
            lane.drain()

    def _new_mover(self, placement: Placement) -> Mover:
        on_device = {bool(memory.rank.device_uuid) for memory in self._ranks.values()}
        if len(on_device) > 1:
            raise ValueError("some ranks registered CPU tensors and some CUDA tensors")
        if on_device.pop():
            from flexkv_radix.transfer.cuda import CudaMover

            self._mark_device()
            return CudaMover(placement, self._config.thread_blocks)
        from flexkv_radix.transfer.cpu import CpuMover

        return CpuMover(placement, self._config.copy_threads)

    def _accept_eventfds(self, listener: socket.socket, pp_rank: int) -> None:
        self._drain()  # replacing eventfds closes the earlier ones
        try:
            self._signals.accept(listener, pp_rank)
        except (OSError, ValueError) as error:
            logger.warning("a rank's eventfds did not arrive: %s", error)


def _receive_rank(channel: Channel) -> tuple[RegisterRank, list[int]]:
    message = channel.receive()
    if not isinstance(message, Register):
        raise ConnectionError(f"Register expected, not {type(message).__name__}")
    rank = message.rank
    return rank, receive_fds(channel.sock, 0 if rank.device_uuid else len(rank.storages))


def _reply(channel: Channel, error: str) -> None:
    with contextlib.suppress(OSError):  # a rank that left meanwhile is noticed by its closed socket
        channel.send(Registered(error))


def _map_rank(rank: RegisterRank, fds: list[int]) -> RankMemory:
    if rank.device_uuid:
        from flexkv_radix.transfer.cuda import CudaRankMemory

        return CudaRankMemory(rank)
    from flexkv_radix.transfer.cpu import CpuRankMemory

    return CpuRankMemory(rank, fds)


def _num_layers(placement: Placement) -> dict[RankPlace, int]:
    num_layers: dict[RankPlace, int] = {}
    for parts in placement.parts.values():
        for placed in parts:
            last = max(segment.layer for segment in placed.part.segments)
            num_layers[placed.place] = max(num_layers.get(placed.place, 0), last + 1)
    return num_layers


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before prctl
        os._exit(0)


def main() -> int:
    _die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s transfer worker: %(message)s")
    engine = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = engine.receive()
    if not isinstance(start, Start):
        return 1
    try:
        Worker(engine, start.config).run()
    except Exception as error:
        logger.exception("the transfer worker stops")
        engine.send(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
