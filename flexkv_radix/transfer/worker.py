"""The transfer worker of an engine: python -m flexkv_radix.transfer.worker <socket> <parent pid> [<lifeline>]

It runs apart from the engine so that copies and driver calls never hold up the engine's interpreter,
and so that a crash of one is not a crash of the other.  It never outlives its parent: the engine's
staged slots go to others once the lease, of which it holds a dup, is released.

One loop answers the engine and its ranks; lanes (threads) do the work.
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

from flexkv_radix.transfer.claims import Gate
from flexkv_radix.transfer.lane import Lane
from flexkv_radix.transfer.lifeline import show_end
from flexkv_radix.transfer.mapping import MappedStore
from flexkv_radix.transfer.mover import Mover, Placement, RankMemory
from flexkv_radix.transfer.peers import Peer, peer_pid
from flexkv_radix.transfer.protocol import (
    Contest,
    DeviceMarked,
    Failed,
    Joined,
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
    decode,
)
from flexkv_radix.transfer.reception import Arrival, Reception
from flexkv_radix.transfer.roster import Roster
from flexkv_radix.transfer.signals import LayerSignals
from flexkv_radix.transfer.wire import MAX_MESSAGE_BYTES, Channel, close_fds, listen, receive_fds, socket_path

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000  # short sleeps between looks at a running transfer should be short

logger = logging.getLogger(__name__)


class Worker:
    """Answers the engine and its ranks."""

    def __init__(self, engine: Channel, config: TransferConfig) -> None:
        self._engine = engine
        self._send_lock = threading.Lock()
        self._config = config
        self._gate = Gate(config.register_endpoint, config.owner)
        listener = listen(config.register_endpoint, rival=self._gate.rival)
        self._signals = LayerSignals(config.layerwise_sockets)
        self._lanes = {kind: Lane(kind, self._report, self._signals) for kind in OpKind}
        self._device_marked = threading.Event()
        self._roster = Roster(
            MappedStore(config.store), config.num_ranks, self._signals, self._new_mover, self._drain
        )
        self._peers: dict[Channel, Peer] = {}  # of the ranks
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._watch(engine.sock, self._serve_engine)
        self._watch(self._roster.wake_fd, self._take_mover)
        self._reception = Reception()
        self._reception.open(listener, self._meet_rank)
        for sock, pp_rank in self._signals.listeners:
            self._reception.open(sock, functools.partial(self._meet_layers, pp_rank))
        self._watch(self._reception.fileno(), self._reception.serve)

    def run(self) -> None:
        """Serve until the engine says stop."""
        while not self._is_stopping:
            ready = self._selector.select(self._reception.timeout_s())
            for key, _ in ready:
                key.data()
            if not ready:
                self._reception.serve()
        for lane in self._lanes.values():
            lane.stop()
        self._remove_sockets()

    def _watch(self, file: socket.socket | int, serve: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, serve)

    def _remove_sockets(self) -> None:
        paths = [socket_path(self._config.register_endpoint)]
        paths += [socket_path(at.path) for at in self._config.layerwise_sockets]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # -- the engine

    def _serve_engine(self) -> None:
        for message in self._engine.receive_available():
            match message:
                case Submit(ops=ops):
                    for op in ops:
                        self._lanes[op.kind].submit(op, self._roster.equipment)
                case DeviceMarked():
                    self._device_marked.set()
                case Stop():
                    self._is_stopping = True
                case _:
                    raise RuntimeError(f"unexpected {type(message).__name__} from the engine")
        if not self._engine.is_open:
            os._exit(0)  # the engine is gone: not a byte more into its slots

    def _report(self, result: OpResult) -> None:
        self._send(Results([result]))

    def _send(self, message: Message) -> None:
        with self._send_lock:
            self._engine.send(message)

    # -- ranks

    def _meet_rank(self, arrival: Arrival) -> Callable[[], None] | None:
        payload = arrival.payload(MAX_MESSAGE_BYTES)
        if payload is None:
            return None
        message = decode(payload)
        if isinstance(message, Contest):
            return functools.partial(self._drop_strangers, arrival.sock)
        if not isinstance(message, Register):
            raise ConnectionError(f"Register expected, not {type(message).__name__}")
        rank = message.rank
        fds = arrival.take_fds(0 if rank.device_uuid else len(rank.storages))
        return None if fds is None else functools.partial(self._add_rank, arrival.sock, rank, fds)

    def _add_rank(self, sock: socket.socket, rank: RegisterRank, fds: list[int]) -> None:
        channel = Channel(sock)
        try:
            if refusal := self._refusal(rank.place, peer_pid(sock)):
                _reply(channel, refusal, may_pass=True)
                channel.close()
                return
            self._roster.add(channel, _map_rank(rank, fds))
        except Exception as error:
            _reply(channel, str(error))
            raise
        finally:
            close_fds(fds)
        self._peers[channel] = Peer(sock)
        for fd in self._peers[channel].files:
            self._watch(fd, functools.partial(self._serve_rank, channel))
        self._send(Joined(len(self._roster)))
        _reply(channel, "")
        logger.info("%s registered", rank.place)

    def _refusal(self, place: RankPlace, pid: int) -> str:
        """Why a rank is not taken, which does no harm to those that were; "" if it is."""
        if refusal := self._gate.refusal(pid):
            return refusal
        holder = self._roster.holder(place)
        if holder is not None and self._gate.is_nearer(pid, peer_pid(holder.sock)):
            logger.warning("%s: process %d has it, and not %d", place, pid, peer_pid(holder.sock))
            self._drop_rank(holder)
        return self._roster.refusal(place)

    def _drop_strangers(self, sock: socket.socket) -> None:
        """The engine that connected by sock claims the endpoint: some ranks may turn out to be its."""
        sock.close()
        for channel in list(self._peers):
            if refusal := self._gate.refusal(peer_pid(channel.sock), is_in=True):
                logger.warning("a rank has to go: %s", refusal)
                self._drop_rank(channel)

    def _serve_rank(self, channel: Channel) -> None:
        """The rank is gone, or says what nobody asked."""
        if channel not in self._peers:  # both of the peer's files had the news
            return
        channel.receive_available()
        if not channel.is_open or self._peers[channel].has_ended():
            self._drop_rank(channel)

    def _drop_rank(self, channel: Channel) -> None:
        peer = self._peers.pop(channel)
        for fd in peer.files:
            self._selector.unregister(fd)
        self._roster.remove(channel, peer.close)
        self._send(Joined(len(self._roster)))

    def _take_mover(self) -> None:
        if self._roster.take_mover():
            self._send(Ready())

    def _drain(self) -> None:
        for lane in self._lanes.values():
            lane.drain()

    def _new_mover(self, placement: Placement) -> Mover:
        """Called beside the loop."""
        if not placement.is_on_device():
            from flexkv_radix.transfer.cpu import CpuMover

            return CpuMover(placement, self._config.copy_threads)
        from flexkv_radix.transfer.cuda import CudaMover

        self._send(MarkDevice())  # the client's slots need a quarantine from now on, should it die
        self._device_marked.wait()
        return CudaMover(placement, self._config)

    def _meet_layers(self, pp_rank: int, arrival: Arrival) -> Callable[[], None] | None:
        if refusal := self._gate.refusal(peer_pid(arrival.sock)):
            raise ConnectionError(refusal)
        add = self._signals.meet(pp_rank, arrival)
        return None if add is None else functools.partial(self._add_eventfds, add)

    def _add_eventfds(self, add: Callable[[], None]) -> None:
        self._drain()  # replacing eventfds closes the earlier ones
        add()


def _reply(channel: Channel, error: str, *, may_pass: bool = False) -> None:
    with contextlib.suppress(OSError):  # a rank that left meanwhile is noticed by its closed socket
        channel.send(Registered(error, may_pass))


def _map_rank(rank: RegisterRank, fds: list[int]) -> RankMemory:
    if rank.device_uuid:
        from flexkv_radix.transfer.cuda_memory import CudaRankMemory

        return CudaRankMemory(rank)
    from flexkv_radix.transfer.cpu import CpuRankMemory

    return CpuRankMemory(rank, fds)


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before prctl
        os._exit(0)


def main() -> int:
    _die_with_parent(int(sys.argv[2]))
    for lifeline_fd in sys.argv[3:]:
        show_end(int(lifeline_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s transfer worker: %(message)s")
    engine = Channel(socket.socket(fileno=int(sys.argv[1])))
    receive_fds(engine.sock, 1)  # the client's lease: held until this process ends
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
