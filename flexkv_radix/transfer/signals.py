"""The worker's side of layerwise loads: eventfds by rank, counter and layer (layerwise.py)."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexkv_radix.layerwise import ACCEPTED, HANDSHAKE
from flexkv_radix.transfer.protocol import LayerwiseSocket, RankPlace
from flexkv_radix.transfer.reception import Arrival, Reception
from flexkv_radix.transfer.wire import close_fds, listen, wait_readable

logger = logging.getLogger(__name__)

_MAX_LAYERS = 4096
_MAX_COUNTERS = 64
_STOP_POLL_S = 0.2


@dataclass(frozen=True)
class _RankEvents:
    sock: socket.socket
    fds: Sequence[Sequence[int]]  # by counter, then layer

    def close(self) -> None:
        self.sock.close()
        for fds in self.fds:
            close_fds(fds)


class LayerSignals:
    """Receives the eventfds of all ranks of an engine.

    Eventfds are replaced and closed only while no load is under way; the caller sees to that.
    """

    def __init__(self, sockets: Sequence[LayerwiseSocket], stop: threading.Event | None = None) -> None:
        """RuntimeError when somebody else listens there, at once if stop is set."""
        self.listeners: list[tuple[socket.socket, int]] = []
        self._events: dict[tuple[int, int], _RankEvents] = {}  # by pipeline and tensor-parallel rank
        self._num_layers: Mapping[RankPlace, int] = {}
        try:
            for at in sockets:
                self.listeners.append((listen(at.path, stop), at.pp_rank))
        except BaseException:
            self.close()
            raise

    def meet(self, pp_rank: int, arrival: Arrival) -> Callable[[], None] | None:
        """What takes the eventfds of a rank, once they are all there.  ValueError: they never will be."""
        if len(arrival.data) < HANDSHAKE.size:
            return None
        rank, num_layers, num_counters = _shape(arrival.data)
        fds = arrival.take_fds(num_layers * num_counters)
        if fds is None:
            return None
        by_counter = [fds[first : first + num_layers] for first in range(0, len(fds), num_layers)]
        return functools.partial(self._add, (pp_rank, rank), _RankEvents(arrival.sock, by_counter))

    def _add(self, place: tuple[int, int], events: _RankEvents) -> None:
        try:
            events.sock.sendall(ACCEPTED)
        except OSError as error:
            logger.warning("a rank left before its eventfds were accepted: %s", error)
            events.close()
            return
        if (earlier := self._events.pop(place, None)) is not None:
            earlier.close()
        self._events[place] = events

    def bind(self, num_layers: Mapping[RankPlace, int]) -> None:
        """Say which ranks there are, and how many layers each has."""
        self._num_layers = num_layers

    def layer_fds(self, counter_id: int) -> Mapping[RankPlace, Sequence[int]]:
        """The layers' eventfds of every rank; ValueError if any is missing."""
        return {place: self._rank_fds(place, counter_id) for place in self._num_layers}

    def _rank_fds(self, place: RankPlace, counter_id: int) -> Sequence[int]:
        events = self._events.get((place.pp_rank, self._local_rank(place)))
        if events is None:
            raise ValueError(f"layerwise: {place} has sent no eventfds")
        if not 0 <= counter_id < len(events.fds):
            raise ValueError(f"counter_id: {counter_id} given, {place} sent {len(events.fds)} counters")
        fds = events.fds[counter_id]
        if len(fds) < self._num_layers[place]:
            raise ValueError(
                f"layerwise: {place} sent {len(fds)} eventfds for {self._num_layers[place]} layers"
            )
        return fds

    def _local_rank(self, place: RankPlace) -> int:
        """Ranks count from 0 within their pipeline stage when they send eventfds."""
        stage = sorted(other.tp_rank for other in self._num_layers if other.pp_rank == place.pp_rank)
        return stage.index(place.tp_rank)

    def announce_failure(self, counter_id: int) -> None:
        """Tell the ranks that the load of counter_id failed; one that left needs no word."""
        for events in self._events.values():
            with contextlib.suppress(OSError, ValueError):
                events.sock.send(bytes([counter_id]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        for events in self._events.values():
            events.close()
        self._events.clear()
        for listener, _ in self.listeners:
            listener.close()


def accept_unused(sockets: Sequence[LayerwiseSocket], stop: threading.Event) -> None:
    """Take eventfds that nothing will signal, until stop.

    Where no worker runs because the cache is off, ranks would otherwise wait for one when they start.
    """
    try:
        signals = LayerSignals(sockets, stop)
    except RuntimeError as error:
        if not stop.is_set():
            logger.warning("ranks that load layer by layer cannot start: %s", error)
        return
    reception = Reception()
    try:
        for listener, pp_rank in signals.listeners:
            reception.open(listener, functools.partial(signals.meet, pp_rank))
        while sockets and not stop.is_set():
            wait_readable(reception, _STOP_POLL_S)
            reception.serve()
    finally:
        signals.close()
        reception.close()
        for at in sockets:
            Path(at.path).unlink(missing_ok=True)


def _shape(data: bytearray) -> tuple[int, int, int]:
    rank, num_ranks, num_layers, num_counters = HANDSHAKE.unpack_from(data)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"layerwise: rank {rank} of {num_ranks}")
    if not 0 < num_layers <= _MAX_LAYERS or not 0 < num_counters <= _MAX_COUNTERS:
        raise ValueError(f"layerwise: {num_layers} layers, {num_counters} counters")
    return rank, num_layers, num_counters
